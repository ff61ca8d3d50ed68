"""Attention of a block drafter in training (DFlash, arXiv 2602.06036): many blocks of rows over one sequence.

A block stands for a draft that starts after a slot of the sequence, its anchor slot. Each of its N rows sees the
context keys of the anchor slot and of earlier slots in its document, and the keys of its own block: all of them, or
with `causal` those up to its own. It never sees another block. With `window` a row sees only the last `window` of these
keys, which is what the paged kernels do in serving (kernels/attention.py).

Contract: one fp32 softmax runs over both kinds of keys. Blocks are processed in groups, so that scores of at most
CHUNK_ELEMENTS are in memory at a time; with gradients they are recomputed in the backward pass.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**24  # scores in memory at a time: 64 MB in fp32


def block_attention(
    q: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    slots: Tensor,
    starts: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Compute attention for q `[B, M, N, nh, D]`, the N rows of M blocks per sequence -> `[B, M, N, nh, D]`.

    context: keys and values of the sequence's slots, `[B, T, nkv, D]` each; block: those of the rows, `[B, M, N, nkv,
    D]`. slots `[B, M]`: each block's anchor slot, in any order. starts `[B, T]`: the slot at which each slot's document
    begins; None: each sequence is one document.
    """
    batch, blocks, rows, heads, _ = q.shape
    length = context[0].shape[1]
    first = torch.zeros_like(slots) if starts is None else starts.gather(1, slots)
    group = max(1, CHUNK_ELEMENTS // (batch * heads * rows * (length + rows)))
    attend = partial(_attend, causal=causal, window=window)
    if group < blocks and torch.is_grad_enabled():
        attend = partial(checkpoint, attend, use_reentrant=False)
    parts = [
        attend(q[:, part], *context, block[0][:, part], block[1][:, part], slots[:, part], first[:, part])
        for part in (slice(begin, begin + group) for begin in range(0, blocks, group))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    slots: Tensor,
    first: Tensor,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    length, kv_heads, rows = context_k.shape[1], context_k.shape[2], q.shape[2]
    q = q.unflatten(3, (kv_heads, -1)).permute(0, 3, 1, 4, 2, 5)  # [B, nkv, M, G, N, D]
    keys, values = (x.transpose(1, 2)[:, :, None, None] for x in (context_k, context_v))  # [B, nkv, 1, 1, T, D]
    row_keys, row_values = (x.permute(0, 3, 1, 2, 4)[:, :, :, None] for x in (block_k, block_v))  # [B, nkv, M, 1, N, D]
    mask = torch.cat(visible(length, rows, slots, first, causal=causal, window=window), dim=-1)[:, None, :, None]
    scores = torch.cat([q @ keys.transpose(-1, -2), q @ row_keys.transpose(-1, -2)], dim=-1) * q.shape[-1] ** -0.5
    weights = scores.float().masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype)
    out = weights[..., :length] @ values + weights[..., length:] @ row_values
    return out.permute(0, 2, 4, 1, 3, 5).flatten(3, 4)


def visible(
    length: int, rows: int, slots: Tensor, first: Tensor, *, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return which keys each row sees: of the context, bool `[B, M, N, T]`, and of its block, `[B, M, N, N]`.

    slots and first `[B, M]`: the anchor slot of a block, and the slot at which its document begins.
    """
    slot, row = torch.arange(length, device=slots.device), torch.arange(rows, device=slots.device)
    last = row if causal else torch.full_like(row, rows - 1)  # of the block's rows that a row sees
    seen_block = (row <= last[:, None]).expand(*slots.shape, rows, rows)
    begin = first[..., None].expand(*slots.shape, rows)
    if window is not None:  # the number of keys up to the anchor slot and in the block
        begin = torch.maximum(begin, slots[..., None] + 1 + last + 1 - window)
        seen_block = seen_block & (row > last[:, None] - window)
    seen_context = (slot >= begin[..., None]) & (slot <= slots[..., None, None])
    return seen_context, seen_block
