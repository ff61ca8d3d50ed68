# pyright: reportCallIssue=false, reportArgumentType=false
"""Gathers and concatenates rows of up to four tensors in one launch: a program per row, tensor and block of columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
MOST = 4  # tensors; heads rarely read more


@triton.jit
def gather_kernel(a, b, c, d, stride_a, stride_b, stride_c, stride_d, index, out, size, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    origin = tl.load(index + row)
    destination = out + (row * tl.num_programs(1) + part) * size + columns
    if part == 0:
        tl.store(destination, tl.load(a + origin * stride_a + columns, mask=inside), mask=inside)
    if part == 1:
        tl.store(destination, tl.load(b + origin * stride_b + columns, mask=inside), mask=inside)
    if part == 2:
        tl.store(destination, tl.load(c + origin * stride_c + columns, mask=inside), mask=inside)
    if part == 3:
        tl.store(destination, tl.load(d + origin * stride_d + columns, mask=inside), mask=inside)


def gather_rows(parts: Sequence[Tensor], index: Tensor) -> Tensor:
    """As kernels.copies.gather_rows, for at most MOST parts."""
    size, first = parts[0].shape[1], parts[0]
    assert all(part.stride(1) == 1 and part.dtype is first.dtype for part in parts), "columns beside each other"
    padded = [*parts, *[first] * (MOST - len(parts))]
    out = torch.empty(len(index), len(parts) * size, dtype=first.dtype, device=first.device)
    grid = len(index), len(parts), triton.cdiv(size, BLOCK)
    gather_kernel[grid](*padded, *(part.stride(0) for part in padded), index, out, size, BLOCK=BLOCK)
    return out
