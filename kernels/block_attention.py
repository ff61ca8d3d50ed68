"""Attention of a block drafter in training (DFlash, arXiv 2602.06036): many blocks of rows over one sequence.

A block stands for a draft that starts after a slot of the sequence, its anchor slot. Each of its N rows sees the
context keys of the anchor slot and of earlier slots in its document, and the keys of its own block: all of them, or
with `causal` those up to its own. It never sees another block. With `window` a row sees only the last `window` of these
keys, which is what the paged kernels do in serving (kernels/attention.py).

Contract: one fp32 softmax runs over both kinds of keys. Gradients of keys are summed over all rows that see them in a
fixed order.

The torch implementation materialises all scores; a Triton kernel on CUDA devices (kernels/triton/block_attention.py)
and one in C on CPUs (range_attention.py) hold only tiles of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.range_attention import RangeAttention, range_dtype
from kernels.ttt_attention import kernel_dtype


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
    dtype, attention = range_dtype(q), RangeAttention
    if (of_triton := kernel_dtype(q)) is not None:
        from kernels.triton.block_attention import RangesAttention

        dtype, attention = of_triton, RangesAttention
    if dtype is None:
        return dense_block_attention(q, context, block, slots, starts, causal=causal, window=window)
    lined_up = [x.to(dtype).flatten(1, 2) for x in (q, *block)]
    bounds = key_bounds(q.shape[2], slots, first_slots(slots, starts), causal=causal, window=window)
    out = attention.apply(lined_up[0], *[x.to(dtype) for x in context], *lined_up[1:], *bounds)
    return out.view(q.shape)


def first_slots(slots: Tensor, starts: Tensor | None) -> Tensor:
    """Return the slot at which the document of each of `slots` `[B, M]` begins."""
    return torch.zeros_like(slots) if starts is None else starts.gather(1, slots)


def dense_block_attention(
    q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], slots: Tensor,
    starts: Tensor | None = None, *, causal: bool = False, window: int | None = None,
) -> Tensor:  # fmt: skip
    """As `block_attention`, in torch."""
    length, kv_heads, rows = context[0].shape[1], context[0].shape[2], q.shape[2]
    q = q.unflatten(3, (kv_heads, -1)).permute(0, 3, 1, 4, 2, 5)  # [B, nkv, M, G, N, D]
    keys, values = (x.transpose(1, 2) for x in context)  # [B, nkv, T, D]
    row_keys, row_values = (x.permute(0, 3, 1, 2, 4)[:, :, :, None] for x in block)  # [B, nkv, M, 1, N, D]
    seen_keys = visible(length, rows, slots, first_slots(slots, starts), causal=causal, window=window)
    mask = torch.cat(seen_keys, dim=-1)[:, None, :, None]
    # one product for the rows of all blocks, for each of which torch would copy the context's keys
    context_scores = (q.flatten(2, 4) @ keys.transpose(-1, -2)).unflatten(2, q.shape[2:5])
    scores = torch.cat([context_scores, q @ row_keys.transpose(-1, -2)], dim=-1) * q.shape[-1] ** -0.5
    weights = scores.float().masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype)
    seen = (weights[..., :length].flatten(2, 4) @ values).unflatten(2, q.shape[2:5])
    out = seen + weights[..., length:] @ row_values
    return out.permute(0, 2, 4, 1, 3, 5).flatten(3, 4)


def visible(
    length: int, rows: int, slots: Tensor, first: Tensor, *, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return which keys each row sees: of the context, bool `[B, M, N, T]`, and of its block, `[B, M, N, N]`.

    slots and first `[B, M]`: the anchor slot of a block, and the slot at which its document begins.
    """
    slot, row = torch.arange(length, device=slots.device), torch.arange(rows, device=slots.device)
    begin, block_begin, block_end = key_ranges(rows, slots, first, causal=causal, window=window)
    seen_context = (slot >= begin[..., None]) & (slot <= slots[..., None, None])
    seen_block = (row >= block_begin[:, None]) & (row < block_end[:, None])
    return seen_context, seen_block.expand(*slots.shape, rows, rows)


def key_ranges(
    rows: int, slots: Tensor, first: Tensor, *, causal: bool, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first context key that each row sees, `[B, M, N]`; the last one is that of its anchor slot.

    And the first key that a row sees of its block, and the end of these, `[N]` each. slots and first as above.
    """
    row = torch.arange(rows, device=slots.device)
    end = row + 1 if causal else torch.full_like(row, rows)
    begin, block_begin = first[..., None].expand(*slots.shape, rows), torch.zeros_like(row)
    if window is not None:  # the number of keys up to the anchor slot and in the block
        begin = torch.maximum(begin, slots[..., None] + 1 + end - window)
        block_begin = (end - window).clamp(min=0)
    return begin, block_begin, end


def key_bounds(rows: int, slots: Tensor, first: Tensor, *, causal: bool, window: int | None) -> list[Tensor]:
    """Return the first key and the end of each row's two ranges, `[B, M * N]` int32 each.

    Of the context's keys, and of those of all blocks' rows in a line.
    """
    begin, block_begin, block_end = key_ranges(rows, slots, first, causal=causal, window=window)
    line = rows * torch.arange(slots.shape[1], device=slots.device)[:, None]  # at which a block begins
    bounds = begin, slots[..., None] + 1, line + block_begin, line + block_end
    return [bound.expand(*slots.shape, rows).flatten(1).to(torch.int32) for bound in bounds]
