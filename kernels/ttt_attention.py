"""Attention of EAGLE-3's training-time test (arXiv 2503.01840), forward and backward: a causal block and diagonals.

A head is unrolled over its own states. At step s a row, which stands for a slot of the sequence, sees the step-0 keys
of its slot and of earlier slots in its document, and from every later step only the key of its own slot: the keys that
a chain draft has in its KV cache. In P-EAGLE all rows of one slot see the same keys. A window bounds the step-0 keys.

Contract and implementations are those of range_attention.py, but for step 0 with one document per row: that is plain
causal attention, for which torch's kernel is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.range_attention import attend, kernel_dtype


def ttt_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    slots: Tensor | None = None,
    starts: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute attention for q `[B, M, nh, D]`, this step's rows -> `[B, M, nh, D]`, in q's dtype or that of autocast.

    keys and values: of step 0 `[B, T, nkv, D]`, of each later step up to this one `[B, M, nkv, D]`; values may have
    another size, which the result then has, and torch runs. `slots` `[M]` or `[B, M]`: the slot of each row, in any
    order; None: row m is slot m. starts `[B, T]`: the slot at which each slot's document begins; None: each row of the
    batch is one document. window: a row sees only the last `window` step-0 keys up to its slot's.
    """
    if len(keys) == 1 and slots is starts is window is None:
        groups = q.shape[2] // keys[0].shape[2]
        k, v = (repeat_kv(x[0].transpose(1, 2), groups) for x in (keys, values))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)
    return attend(*in_ranges(q, keys, values, slots, starts, window))


def in_ranges(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor | None = None,
    starts: Tensor | None = None, window: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return what `attend` takes: a row's tail are the keys of its slot in later steps."""
    limits, later = bounds(keys[0].shape[:2], slots, starts, q.device, window), len(keys) - 1
    tails = [torch.stack(x[1:], 2).flatten(1, 2) if later else x[0][:, :0] for x in map(list, (keys, values))]
    first = (later * torch.arange(q.shape[1], device=q.device)).to(torch.int32).expand_as(limits[0])
    return [q, keys[0], values[0], *tails, *limits, first, first + later]


def operand(x: Tensor) -> Tensor:
    """Return a step's keys or values as the kernel takes them. Every later step reads them, so they are cast once."""
    dtype = kernel_dtype(x)
    return x if dtype is None else x.to(dtype)


def bounds(
    shape: torch.Size, slots: Tensor | None, starts: Tensor | None, device: torch.device, window: int | None = None
) -> list[Tensor]:
    """Return the first step-0 key that each row sees and the end of its range, `[B, M]` int32 each; shape `[B, T]`."""
    batch, length = shape
    slots = (torch.arange(length, device=device) if slots is None else slots).expand(batch, -1)
    first = torch.zeros_like(slots) if starts is None else starts.gather(1, slots)
    first = first if window is None else torch.maximum(first, slots + 1 - window)
    return [first.to(torch.int32), slots.to(torch.int32) + 1]


def visible(starts: Tensor) -> Tensor:
    """Return the mask of packed documents, bool `[B, 1, T, T]`: a slot sees itself and earlier slots of its document.

    starts `[B, T]`: the slot at which a slot's document begins.
    """
    columns = torch.arange(starts.shape[1], device=starts.device)
    return ((columns >= starts[..., None]) & (columns <= columns[:, None])).unsqueeze(1)


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """`[B, nkv, T, D]` -> `[B, nkv * groups, T, D]`, each KV head repeated for its query heads."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)
