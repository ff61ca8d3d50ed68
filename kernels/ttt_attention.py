"""Attention of EAGLE-3's training-time test (arXiv 2503.01840), forward and backward: a causal block and diagonals.

A head is unrolled over its own states. At step s a row, which stands for a slot of the sequence, sees the step-0 keys
of its slot and of earlier slots in its document, and from every later step only the key of its own slot: the keys that
a chain draft has in its KV cache. In P-EAGLE all rows of one slot see the same keys. A window bounds the step-0 keys.

Contract: one fp32 softmax runs over both kinds of keys. Gradients are those of the dense form; those of step-0 keys are
summed over all rows that see them in a fixed order, so that runs are bitwise reproducible.

The torch implementation materialises all scores, `[B, nh, M, T + s]` per step; a Triton kernel on CUDA devices
(kernels/triton/ttt_attention.py) and one in C on CPUs (range_attention.py) hold only tiles of them. Step 0 with one
document per row is plain causal attention, for which torch's kernel is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.range_attention import RangeAttention, range_dtype


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
    alike, plain = values[0].shape[-1] == q.shape[-1], len(keys) == 1 and slots is starts is window is None
    if alike and not plain and (dtype := kernel_dtype(q)) is not None:
        from kernels.triton.ttt_attention import TttAttention

        q, *kv = (x.to(dtype) for x in (q, *keys, *values))
        return TttAttention.apply(q, *bounds(keys[0].shape[:2], slots, starts, q.device, window), *kv)
    if alike and not plain and (dtype := range_dtype(q)) is not None:
        begin, end = bounds(keys[0].shape[:2], slots, starts, q.device, window)
        later = len(keys) - 1
        own = (torch.stack(x[1:], dim=2).flatten(1, 2) if later else x[0][:, :0] for x in map(list, (keys, values)))
        first = (later * torch.arange(q.shape[1])).to(torch.int32).expand_as(begin)
        kv = (x.to(dtype) for x in (keys[0], values[0], *own))
        return RangeAttention.apply(q.to(dtype), *kv, begin, end, first, first + later)
    return dense(q, keys, values, slots, starts, window)


def kernel_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which the Triton kernel takes x `[..., D]`; None where torch runs instead."""
    if not uses_triton(x.device):
        return None
    from kernels.triton.key_ranges import supported

    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return dtype if supported(x.shape[-1], dtype) else None


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


def visible(starts: Tensor, slots: Tensor | None = None, window: int | None = None) -> Tensor:
    """Return the mask of packed documents, bool `[B, 1, M, T]`: a slot sees itself and earlier slots of its document.

    starts `[B, T]`: the slot at which a slot's document begins. With `slots` `[M]` or `[B, M]` only the rows of these.
    With `window` a row sees so many slots at most.
    """
    first, end = bounds(starts.shape, slots, starts, starts.device, window)
    columns = torch.arange(starts.shape[1], device=starts.device)
    return ((columns >= first[..., None]) & (columns < end[..., None])).unsqueeze(1)


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """`[B, nkv, T, D]` -> `[B, nkv * groups, T, D]`, each KV head repeated for its query heads."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def dense(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    slots: Tensor | None,
    starts: Tensor | None,
    window: int | None = None,
) -> Tensor:
    """As `ttt_attention`, in torch. Query heads of one KV head share a matrix product."""
    T, groups, scale = keys[0].shape[1], q.shape[2] // keys[0].shape[2], q.shape[3] ** -0.5
    q, k, v = (x.transpose(1, 2) for x in (q, keys[0], values[0]))  # [B, heads, T, D]
    plain = slots is starts is window is None
    if starts is None:
        starts = torch.zeros(len(q), T, dtype=torch.int64, device=q.device)
    if len(keys) == 1:
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        mask = None if plain else visible(starts, slots, window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain).transpose(1, 2)
    q = q.unflatten(1, (-1, groups))  # [B, nkv, G, M, D]
    mask = visible(starts, slots, window).unsqueeze(1)
    scores = (q.flatten(2, 3) @ k.transpose(2, 3) * scale).unflatten(2, q.shape[2:4]).masked_fill(~mask, -torch.inf)
    later_keys, later_values = ([x.transpose(1, 2)[:, :, None] for x in steps[1:]] for steps in (keys, values))
    later_scores = torch.stack([(q * key).sum(-1) * scale for key in later_keys], dim=-1)  # [B, nkv, G, M, s]
    weights = torch.cat([scores, later_scores], dim=-1).float().softmax(-1).to(q.dtype)
    out = (weights[..., :T].flatten(2, 3) @ v).unflatten(2, q.shape[2:4])
    for index, value in enumerate(later_values):
        out = out + weights[..., T + index, None] * value
    return out.flatten(1, 2).transpose(1, 2)
