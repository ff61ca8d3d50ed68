"""Medusa heads (arXiv 2401.10774): head d drafts t[i+2+d] from the target's final hidden state f[i] alone.

No head reads a token or another head's draft, so f[i] alone yields every depth: the state of all depths is f[i] itself,
and `logits` applies the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.dispatch import uses_triton
from kernels.elementwise import uniform
from kernels.residual import residual_silu
from kernels.weights.quantize import WeightFormat
from models.attention import Attention
from models.heads.base import MaskHead, Readout
from models.heads.medusa.config import MedusaConfig
from models.heads.weights import HeadModule, pack_layers
from models.layers import Linear, make_lm_head
from models.targets.llama import LlamaTarget


class MedusaBlock(nn.Module):
    """Residual layers `x + silu(W x + b)`, each with separate weights."""

    def __init__(self, size: int, num_layers: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(size, size, bias=bias) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + uniform(F.silu, layer(x))
        return x


class MedusaHead(MaskHead):
    """`token_map` int64 [Vd] holds the target ids of a draft vocabulary that is smaller than the target's."""

    config: MedusaConfig
    lm_head: Linear
    lm_heads: nn.ModuleList
    token_map: Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size, vocabulary = config.target_hidden_size, config.draft_vocab_size
        self.blocks = nn.ModuleList(
            MedusaBlock(size, config.num_layers, bias=config.bias) for _ in range(config.num_heads)
        )
        if config.shared:
            self.lm_head = make_lm_head(size, vocabulary)
            self.lm_head.weight.requires_grad_(False)
        else:
            self.lm_heads = nn.ModuleList(make_lm_head(size, vocabulary) for _ in range(config.num_heads))
        if vocabulary < config.vocab_size:
            self.register_buffer("token_map", torch.arange(vocabulary))
        self.stacks: list[tuple[Tensor, Tensor | None]] = []  # per residual layer: weights [D, H, H], biases [D, H]

    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        (feature,) = aux
        return feature

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        return state

    def readout(self, depth: int) -> Readout:
        return Readout(self.lm_head if self.config.shared else self.lm_heads[depth], self.blocks[depth])

    def all_logits(self, state: Tensor, depths: int) -> Tensor:
        if not self.stacks:
            return super().all_logits(state, depths)
        states = state[None]
        for weight, bias in self.stacks:
            states = residual_silu(states, weight[:depths], bias if bias is None else bias[:depths])
        if self.config.shared:
            return self.lm_head(states).transpose(0, 1)
        pairs = zip(self.lm_heads, states, strict=False)
        return torch.stack([lm_head(rows) for lm_head, rows in pairs], dim=1)


def stack_layers(head: MedusaHead) -> None:
    """Stack on a GPU: one launch then runs a residual layer of all heads. The layers keep views of the stacks."""
    for depth in range(head.config.num_layers):
        layers = [cast(Linear, cast(MedusaBlock, block).layers[depth]) for block in head.blocks]
        weight = torch.stack([layer.weight for layer in layers])
        bias = torch.stack([layer.bias for layer in layers]) if head.config.bias else None
        for index, layer in enumerate(layers):
            layer.weight = nn.Parameter(weight[index], requires_grad=False)
            if bias is not None:
                layer.bias = nn.Parameter(bias[index], requires_grad=False)
        head.stacks.append((weight, bias))


def pack(head: MedusaHead, *, exact: bool, weight_format: WeightFormat) -> None:
    if uses_triton(next(head.parameters()).device):
        stack_layers(head)
    pack_layers(head, exact=exact, weight_format=weight_format)


def initialize(head: MedusaHead, target: LlamaTarget, *, from_target: bool, seed: int) -> None:
    """Zero the residual layers, so that with `from_target` every head starts as the target's LM head."""
    for parameter in head.blocks.parameters():
        parameter.zero_()
    generator = torch.Generator().manual_seed(seed)
    for lm_head in [head.lm_head] if head.config.shared else head.lm_heads:
        assert isinstance(lm_head, Linear)
        if head.config.shared or from_target:
            lm_head.weight.copy_(target.lm_head_rows(head.target_ids))
        else:
            lm_head.weight.normal_(0.0, 0.02, generator=generator)


HEAD = HeadModule(MedusaHead, initialize, pack)
