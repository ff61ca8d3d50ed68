"""Copies: what the host decided to a device, rows of tensors, and KV to cache slots and between them.

The host waits for none of them. What it uploads to a GPU goes in stream order, from pinned memory, which torch does not
use again before it is done.

Contract of a move between slots: as if all sources were read before any destination is written, so sources and
destinations may overlap; destinations are distinct. It moves an accepted path to the front of its tree, in every layer.
KV may be stored in fp8 (e4m3, no scale): rounded to nearest, saturating; NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import uses_triton

FP8_LARGEST = 448.0


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on `device`."""
    if device.type == "cuda" and not tensor.is_cuda and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor of `values` on `device`. One call for several lists costs one copy."""
    return sent(torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda"), device)


def upload_lists(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return lists of any lengths as int64 tensors on `device`, by one copy. Each begins at a multiple of 16 bytes."""
    padded = [[*values, *[0] * (len(values) % 2)] for values in lists]
    parts = upload([value for values in padded for value in values], device).split(list(map(len, padded)))
    return [part[: len(values)] for part, values in zip(parts, lists, strict=True)]


def upload_columns(
    integers: Sequence[Sequence[int]], fractions: Sequence[Sequence[float]], device: torch.device
) -> list[Tensor]:
    """Return columns of one length as int64 and fp32 tensors on `device`, by one copy.

    Each begins at a multiple of 16 bytes: Triton compiles kernels for such addresses.
    """
    count, size = len(integers), len(integers[0])
    padded = size + -size % 4
    words = torch.zeros((2 * count + len(fractions)) * padded, dtype=torch.int32, pin_memory=device.type == "cuda")

    def columns(words: Tensor) -> tuple[Tensor, Tensor]:
        wide, narrow = words.tensor_split([2 * count * padded])
        return wide.view(torch.int64).view(-1, padded)[:, :size], narrow.view(torch.float32).view(-1, padded)[:, :size]

    for column, values in zip(columns(words), (integers, fractions), strict=True):
        column.copy_(torch.tensor(values).view(column.shape))
    return [column for part in columns(sent(words, device)) for column in part]


def gather_rows(parts: Sequence[Tensor], index: Tensor) -> Tensor:
    """parts `[R, H]` each, index `[n]` -> `[n, len(parts) * H]`, in new memory."""
    if uses_triton(index.device):
        from kernels.triton.gather import MOST
        from kernels.triton.gather import gather_rows as fused

        if len(parts) <= MOST:
            return fused(parts, index)
    return torch.cat([part[index] for part in parts], dim=-1)


def select_rows(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """The same for ascending rows that the host knows, of which nothing is copied to the device."""
    joined = torch.cat(list(parts), dim=-1)
    if len(rows) == len(joined):
        return joined
    spans, following = list[int](), -1  # lengths of what is left out and of what is selected, in turn
    for row in rows:
        if row == following:
            spans[-1] += 1
        else:
            spans += [row - max(following, 0), 1]
        following = row + 1
    return torch.cat([joined[:0], *joined.split([*spans, len(joined) - max(following, 0)])[1::2]])


def move_slots(stack: Tensor, source: Tensor, destination: Tensor) -> None:
    """Move slots `source` to `destination`, `[M]` each, in stack `[L, 2, nkv, slots, D]`, which is contiguous."""
    stack = bits_of(stack)
    if uses_triton(stack.device):
        from kernels.triton.move import MOST
        from kernels.triton.move import move_slots as in_place

        if len(source) <= MOST:
            return in_place(stack, source, destination)
    stack[:, :, :, destination] = stack[:, :, :, source]  # the right side is read completely before the write


def write_kv(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor, *, shared_tiles: bool = True) -> None:
    """Write keys `[R, nkv, D]` and values `[R, nkv, Dv]` of any dtype to `slots` `[R]` of cache `[2, nkv, slots, D]`.

    Of a cache `[1, nkv, slots, D]` the values are the first numbers of the keys, fewer than all.

    Numbers of a value that are not finite are stored as zeros and make its key NaN: a row that sees the key has NaN
    from its score, and one that does not can multiply the value by its weight of zero. Without `shared_tiles`, where
    each row sums over the keys that it sees alone (attention in C), they are stored as they are.
    """
    if uses_triton(slots.device):
        from kernels.triton.rotary import write_kv as fused

        return fused(cache, slots, k, v)
    if shared_tiles:
        finite = v.isfinite()
        k, v = k.masked_fill(~finite.all(-1, keepdim=True), torch.nan), v.masked_fill(~finite, 0)
    rows = (k, v) if len(cache) == 2 else (torch.cat([v, k[..., v.shape[-1] :]], -1),)
    for stored, new in zip(cache, rows, strict=True):
        bits_of(stored).index_copy_(1, slots, bits_of(narrowed(new.transpose(0, 1), cache.dtype)))


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Read cache `[..., slots, D]` at slots `[M]` -> `[..., M, D]` in the cache's dtype."""
    return bits_of(cache).index_select(-2, slots).view(cache.dtype)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is not torch.float8_e4m3fn:
        return x.to(dtype)
    return x.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(dtype)


def bits_of(x: Tensor) -> Tensor:
    """View fp8 as int8, which every operation that only copies supports."""
    return x.view(torch.int8) if x.dtype is torch.float8_e4m3fn else x
