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

from kernels.residual import residual_silu
from kernels.triton import in_use
from models.attention import Attention
from models.heads.base import Head
from models.heads.medusa.config import MedusaConfig
from models.layers import Linear
from models.targets.llama import LlamaTarget
from models.vocab import target_ids


class MedusaBlock(nn.Module):
    """Residual layers `x + silu(W x + b)`, each with separate weights."""

    def __init__(self, size: int, num_layers: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(size, size, bias=bias) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(Head):
    """`token_map` int64 [Vd] holds the target ids of a draft vocabulary that is smaller than the target's."""

    parallel = True

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
            self.lm_head = Linear(size, vocabulary, bias=False)
            self.lm_head.weight.requires_grad_(False)
        else:
            self.lm_heads = nn.ModuleList(Linear(size, vocabulary, bias=False) for _ in range(config.num_heads))
        if vocabulary < config.vocab_size:
            self.register_buffer("token_map", torch.arange(vocabulary))
        self._stacks: list[tuple[Tensor, Tensor | None]] = []  # per residual layer: weights [D, H, H], biases [D, H]

    @property
    def target_ids(self) -> Tensor:
        return self.token_map if self.config.draft_vocab_size < self.config.vocab_size else super().target_ids

    @torch.no_grad()
    def set_vocabulary(self, d2t: Tensor, t2d: Tensor) -> None:
        super().set_vocabulary(d2t, t2d)
        if self.config.draft_vocab_size < self.config.vocab_size:
            self.token_map.copy_(target_ids(d2t))

    @property
    def reads_lm_head(self) -> bool:
        return self.config.shared

    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        (feature,) = aux
        return feature

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        return state

    def before_lm_head(self, state: Tensor, depth: int) -> Tensor:
        return self.blocks[depth](state)

    def lm_head_at(self, depth: int) -> nn.Module:
        return self.lm_head if self.config.shared else self.lm_heads[depth]

    def all_logits(self, state: Tensor, depths: int) -> Tensor:
        if not self._stacks:
            return super().all_logits(state, depths)
        states = state[None]
        for weight, bias in self._stacks:
            states = residual_silu(states, weight[:depths], bias if bias is None else bias[:depths])
        if self.config.shared:
            return self.lm_head(states).transpose(0, 1)
        pairs = zip(self.lm_heads, states, strict=False)
        return torch.stack([lm_head(rows) for lm_head, rows in pairs], dim=1)

    def stack_layers(self) -> None:
        """Stack on a GPU: one launch then runs a residual layer of all heads. The layers keep views of the stacks."""
        if not in_use(next(self.parameters()).device):
            return
        for depth in range(self.config.num_layers):
            layers = [cast(Linear, cast(MedusaBlock, block).layers[depth]) for block in self.blocks]
            weight = torch.stack([layer.weight for layer in layers])
            bias = torch.stack([layer.bias for layer in layers]) if self.config.bias else None
            for head, layer in enumerate(layers):
                layer.weight = nn.Parameter(weight[head], requires_grad=False)
                if bias is not None:
                    layer.bias = nn.Parameter(bias[head], requires_grad=False)
            self._stacks.append((weight, bias))

    @torch.no_grad()
    def initialise(self, target: LlamaTarget, *, from_target: bool, seed: int = 0) -> None:
        """Zero the residual layers, so that with `from_target` every head starts as the target's LM head."""
        for parameter in self.blocks.parameters():
            parameter.zero_()
        generator = torch.Generator().manual_seed(seed)
        for lm_head in [self.lm_head] if self.config.shared else self.lm_heads:
            assert isinstance(lm_head, Linear)
            if self.config.shared or from_target:
                lm_head.weight.copy_(target.lm_head.weight[self.target_ids])
            else:
                lm_head.weight.normal_(0.0, 0.02, generator=generator)

    def checkpoint_layout(self) -> dict[str, tuple[str, ...]]:
        """Return vLLM's tensor names; token_map only where Vd < V."""
        truncated = self.config.draft_vocab_size < self.config.vocab_size
        return super().checkpoint_layout() | ({"token_map": ("token_map",)} if truncated else {})


HEAD = MedusaHead
