"""Chains and trees of tokens with a recurrent head, a level at a time: one call where a kernel runs all of it (on a
CPU, kernels/cpu/draft.c). Elsewhere a level is the head's own step, its logits and the choice, one after another.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.cpu.draft import NativeChains, NativeDraft, NativeTrees, supported
from kernels.decoder import NativeDecoder
from kernels.linear import PackedLinear
from kernels.triton import in_use

__all__ = ["DraftParts", "NativeChains", "NativeDraft", "NativeTrees", "join_draft"]


class DraftParts(NamedTuple):
    """A head that makes each state of the token before it and the state before that. It reads them beside each other,
    with `joined` through a linear layer.
    """

    decoder: NativeDecoder
    num_heads: int
    num_kv_heads: int
    embedding: Tensor  # [V, H]
    rotary: tuple[Tensor, Tensor]  # cos and sin [P, D]
    joined: PackedLinear | None  # [H, 2 H]: embedding, then state
    norm: Tensor | None  # [H] between the state and the LM head
    lm_head: PackedLinear  # [Vd, H]
    draft_ids: Tensor  # [Vd] target ids


def join_draft(parts: DraftParts) -> NativeDraft | None:
    """None if no kernel takes these parts."""
    if in_use(parts.embedding.device) or not supported(parts):
        return None
    return NativeDraft(parts)
