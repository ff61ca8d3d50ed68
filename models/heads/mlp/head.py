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
from models.heads.mlp.config import MlpConfig, SpeculatorShape
from models.heads.weights import HeadModule
from models.layers import Embedding, Linear, make_lm_head
from models.targets.llama import LlamaTarget

EPS = 1e-6


class ShiftedRMSNorm(nn.Module):
    """A root-mean-square norm with scale and shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, EPS) + self.bias


class SpeculatorHead(RecurrentHead):
    """A recurrent head without decoder layers. `proj` and `head` hold a projection of the state and an LM head per
    depth, or if weights are tied two projections, the first and one more, and one LM head.
    """

    config: SpeculatorShape
    proj: nn.ModuleList
    head: nn.ModuleList

    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        (feature,) = aux
        if not self.config.scale_input:
            return feature
        return rms_norm(feature, feature.new_ones(feature.shape[-1]), EPS) / math.sqrt(2)

    def index(self, depth: int) -> int:
        """Return which of the weights per depth are those of `depth`."""
        return 0 if self.config.tie_weights else depth

    def projected(self, state: Tensor, depth: int) -> Tensor:
        return self.proj[min(depth, len(self.proj) - 1)](state)

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by, relative to the projected state; the norm after it takes any scale."""
        return self.config.embedding_weight / self.config.state_weight

    def readout(self, depth: int) -> Readout:
        return Readout(self.head[self.index(depth)])


def input_sizes(config: SpeculatorShape) -> list[int]:
    """Return the width of the state that each projection reads."""
    sizes = [config.target_hidden_size, *[config.hidden_size] * (config.n_predict - 1)]
    return sizes[:2] if config.tie_weights else sizes


class MlpHead(SpeculatorHead):
    """Each list holds one module per depth, or one in all if weights are tied (`proj`: the first and one more)."""

    config: MlpConfig

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.config = config
        inner, depths = config.inner_dim, range(config.depths)
        self.emb = nn.ModuleList(Embedding(config.vocab_size, inner) for _ in depths)
        self.proj = nn.ModuleList(Linear(size, inner, bias=False) for size in input_sizes(config))
        self.ln = nn.ModuleList(ShiftedRMSNorm(inner) for _ in depths)
        self.head = nn.ModuleList(make_lm_head(inner, config.vocab_size) for _ in depths)

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        index, projected = self.index(depth), self.projected(state, depth)
        norm, table = cast(ShiftedRMSNorm, self.ln[index]), cast(nn.Embedding, self.emb[index]).weight
        return embed_norm_gelu(projected, ids, table, self.embedding_scale, norm.weight, norm.bias, EPS)


def initialize(head: Head, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Draw all matrices from N(0, 1/sqrt(D)), the variance that `state_weight` and `embedding_weight` assume."""
    assert not from_target, "it starts from nothing of the target's"
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 1 / math.sqrt(head.config.inner_dim), generator=generator)


HEAD = HeadModule(MlpHead, initialize)
