"""Brings KV into slots, and moves it between them: an accepted path comes to the front of its tree, in every layer.

Contract of a move: as if all sources were read before any destination is written, so sources and destinations may
overlap; destinations are distinct. KV may be held in fp8 (e4m3, no scale): rounded to nearest, and what is too large
becomes the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton import in_use

FP8_LARGEST = 448.0


def move_slots(stack: Tensor, source: Tensor, destination: Tensor) -> None:
    """stack `[L, 2, nkv, slots, D]`, contiguous; source and destination `[M]` slots."""
    stack = bits_of(stack)
    if in_use(stack.device):
        from kernels.triton.move import MOST
        from kernels.triton.move import move_slots as in_place

        if len(source) <= MOST:
            return in_place(stack, source, destination)
    stack[:, :, :, destination] = stack[:, :, :, source]  # the right side is read whole before it is written


def write_slots(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """cache `[nkv, slots, D]`, rows `[R, nkv, D]`, in any dtype, each to its slot of `[R]`."""
    bits_of(cache).index_copy_(1, slots, bits_of(narrowed(rows.transpose(0, 1), cache.dtype)))


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """cache `[..., slots, D]`, slots `[M]` -> `[..., M, D]` in the cache's dtype."""
    return bits_of(cache).index_select(-2, slots).view(cache.dtype)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is not torch.float8_e4m3fn:
        return x.to(dtype)
    return x.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(dtype)


def bits_of(x: Tensor) -> Tensor:
    """fp8 as int8, which every operation that only moves numbers takes."""
    return x.view(torch.int8) if x.dtype is torch.float8_e4m3fn else x
