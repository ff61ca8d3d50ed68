"""MLP speculator (arXiv 2404.19124): a small recurrent network with separate weights at every depth.

Depth 0 takes the target's final hidden state f[i] and token t[i+1], depth d the state of depth d - 1 and the token
drafted there. No attention and no position: a draft depends on one hidden state and the tokens after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kernels.elementwise import embed_norm_gelu, rms_norm
from models.attention import Attention
from models.heads.base import Head, Readout, RecurrentHead
from models.heads.mlp.config import MlpConfig
from models.heads.weights import HeadModule
from models.layers import Embedding, Linear
from models.targets.llama import LlamaTarget

EPS = 1e-6


class ShiftedRMSNorm(nn.Module):
    """Scale and shift parameters of a root-mean-square norm (kernels/elementwise.py: embed_norm_gelu)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))


class MlpHead(RecurrentHead):
    """Each list holds one module per depth, or one in all if weights are tied (`proj`: the first and one more)."""

    config: MlpConfig

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.config = config
        inner, count = config.inner_dim, 1 if config.tie_weights else config.n_predict
        steps = min(2, config.n_predict) if config.tie_weights else config.n_predict
        self.emb = nn.ModuleList(Embedding(config.vocab_size, inner) for _ in range(count))
        self.proj = nn.ModuleList(
            Linear(inner if depth else config.target_hidden_size, inner, bias=False) for depth in range(steps)
        )
        self.ln = nn.ModuleList(ShiftedRMSNorm(inner) for _ in range(count))
        self.head = nn.ModuleList(Linear(inner, config.vocab_size, bias=False) for _ in range(count))

    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        (feature,) = aux
        if not self.config.scale_input:
            return feature
        return rms_norm(feature, feature.new_ones(feature.shape[-1]), EPS) / math.sqrt(2)

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        index = 0 if self.config.tie_weights else depth
        projected = self.proj[min(depth, len(self.proj) - 1)](state)
        scale = self.config.embedding_weight / self.config.state_weight
        norm, table = cast(ShiftedRMSNorm, self.ln[index]), cast(nn.Embedding, self.emb[index]).weight
        return embed_norm_gelu(projected, ids, table, scale, norm.weight, norm.bias, EPS)

    def readout(self, depth: int) -> Readout:
        return Readout(self.head[0 if self.config.tie_weights else depth])


def initialize(head: Head, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Draw all matrices from N(0, 1/sqrt(D)), the variance that `state_weight` and `embedding_weight` assume."""
    assert not from_target, "it starts from nothing of the target's"
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 1 / math.sqrt(head.config.inner_dim), generator=generator)


HEAD = HeadModule(MlpHead, initialize)
