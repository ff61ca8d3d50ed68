"""Writes KV to cache slots and moves it between them: an accepted path moves to the front of its tree, in every layer.

Contract of a move: as if all sources were read before any destination is written, so sources and destinations may
overlap; destinations are distinct. KV may be stored in fp8 (e4m3, no scale): rounded to nearest, saturating.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton import in_use

FP8_LARGEST = 448.0


def move_slots(stack: Tensor, source: Tensor, destination: Tensor) -> None:
    """Move slots `source` to `destination`, `[M]` each, in stack `[L, 2, nkv, slots, D]`, which is contiguous."""
    stack = bits_of(stack)
    if in_use(stack.device):
        from kernels.triton.move import MOST
        from kernels.triton.move import move_slots as in_place

        if len(source) <= MOST:
            return in_place(stack, source, destination)
    stack[:, :, :, destination] = stack[:, :, :, source]  # the right side is read completely before the write


def write_slots(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows `[R, nkv, D]` of any dtype to `slots` `[R]` of cache `[nkv, slots, D]`."""
    bits_of(cache).index_copy_(1, slots, bits_of(narrowed(rows.transpose(0, 1), cache.dtype)))


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
