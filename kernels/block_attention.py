"""Attention of a block drafter in training (DFlash, arXiv 2602.06036): many blocks of rows over one sequence.

A block stands for a draft that starts after a slot of the sequence, its anchor slot. Each of its N rows sees the
context keys of the anchor slot and of earlier slots in its document, and the keys of its own block: all of them, or
with `causal` those up to its own. It never sees another block. With `window` a row sees only the last `window` of these
keys, which is what the paged kernels do in serving (kernels/attention.py).

Contract and implementations are those of range_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.range_attention import attend


def block_attention(
    q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], slots: Tensor,
    starts: Tensor | None = None, *, causal: bool = False, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention for q `[B, M, N, nh, D]`, the N rows of M blocks per sequence -> `[B, M, N, nh, D]`.

    The result has q's dtype, or that of autocast.

    context: keys and values of the sequence's slots, `[B, T, nkv, D]` each; block: those of the rows, `[B, M, N, nkv,
    D]`. slots `[B, M]`: each block's anchor slot, in any order. starts `[B, T]`: the slot at which each slot's document
    begins; None: each sequence is one document.
    """
    return attend(*in_ranges(q, context, block, slots, starts, causal=causal, window=window)).view(q.shape)


def in_ranges(
    q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], slots: Tensor,
    starts: Tensor | None = None, *, causal: bool = False, window: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return what `attend` takes: rows and blocks lie in a line, and a row's tail is its block."""
    limits = key_bounds(q.shape[2], slots, first_slots(slots, starts), causal=causal, window=window)
    rows, *tails = (x.flatten(1, 2) for x in (q, *block))
    return [rows, *context, *tails, *limits]


def first_slots(slots: Tensor, starts: Tensor | None) -> Tensor:
    """Return the slot at which the document of each of `slots` `[B, M]` begins."""
    return torch.zeros_like(slots) if starts is None else starts.gather(1, slots)


def key_bounds(rows: int, slots: Tensor, first: Tensor, *, causal: bool, window: int | None) -> list[Tensor]:
    """Return the first key and the end of each row's two ranges, `[B, M * N]` int32 each.

    Of the context's keys, the last of which is the anchor slot's, and of those of all blocks' rows in a line. slots and
    first `[B, M]`: the anchor slot of a block, and the slot at which its document begins.
    """
    row = torch.arange(rows, device=slots.device)
    block_end = row + 1 if causal else torch.full_like(row, rows)
    begin, block_begin = first[..., None].expand(*slots.shape, rows), torch.zeros_like(row)
    if window is not None:  # the number of keys up to the anchor slot and in the block
        begin = torch.maximum(begin, slots[..., None] + 1 + block_end - window)
        block_begin = (block_end - window).clamp(min=0)
    line = rows * torch.arange(slots.shape[1], device=slots.device)[:, None]  # at which a block begins
    bounds = begin, slots[..., None] + 1, line + block_begin, line + block_end
    return [bound.expand(*slots.shape, rows).flatten(1).to(torch.int32) for bound in bounds]
