"""Reference of the attention of training-time test, one row and head at a time in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ttt_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    slots: Tensor,
    starts: Tensor,
    window: int | None = None,
) -> Tensor:
    """As kernels.ttt_attention.ttt_attention, slots `[B, M]` -> `[B, M, nh, D]` float64, differentiable."""
    batch, rows, heads, _ = q.shape
    group, scale = heads // keys[0].shape[2], q.shape[3] ** -0.5
    out = []
    for b in range(batch):
        for row in range(rows):
            last = int(slots[b, row])
            visible = slice(max(int(starts[b, last]), 0 if window is None else last + 1 - window), last + 1)
            for head in range(heads):
                kv_head = head // group
                row_keys, row_values = (
                    torch.cat([first[b, visible, kv_head], *(step[b, row, kv_head][None] for step in later)]).double()
                    for first, *later in (keys, values)
                )
                weights = (row_keys @ q[b, row, head].double() * scale).softmax(-1)
                out.append(weights @ row_values)
    return torch.stack(out).view(batch, rows, heads, -1)
