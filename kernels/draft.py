"""Fused drafting of chains and trees with a recurrent head: one call per level, on a CPU (kernels/cpu/draft.c).

Elsewhere a level is three calls: the head's step, its logits and the choice.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.cpu.draft import NativeChains, NativeDraft, NativeTrees, supported
from kernels.decoder import NativeDecoder
from kernels.linear import PackedLinear
from kernels.triton import in_use

__all__ = ["DraftParts", "NativeChains", "NativeDraft", "NativeTrees", "fuse_draft"]


class DraftParts(NamedTuple):
    """A recurrent head: it computes each state from the previous token's embedding and the previous state.

    Its layers read both concatenated, or with `joined` projected by a linear layer, maybe each after a norm. All norms
    are `centered` if those of the layers are.
    """

    decoder: NativeDecoder
    num_heads: int
    num_kv_heads: int
    embedding: Tensor | PackedLinear  # [V, H]
    rotary: tuple[Tensor, Tensor]  # cos and sin [P, D]
    joined: PackedLinear | None  # [H, 2 H]: embedding, then state; with `state_first` the reverse
    norm: Tensor | None  # [H] between the state and the LM head
    lm_head: PackedLinear  # [Vd, H]
    draft_ids: Tensor  # [Vd] target ids
    token_norm: Tensor | None = None  # [H]
    state_norm: Tensor | None = None  # [H]
    state_first: bool = False
    zero_first: bool = False  # the embedding of a row at position 0 is zero


def fuse_draft(parts: DraftParts) -> NativeDraft | None:
    """Return the fused draft of a head, None if no kernel supports these parts."""
    if in_use(parts.draft_ids.device) or not supported(parts):
        return None
    return NativeDraft(parts)
