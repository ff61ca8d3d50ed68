# pyright: reportCallIssue=false, reportArgumentType=false
"""Convolution along the rows of a block: one program per row and block of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["block"])
def two_taps_kernel(z, base, deltas, out, size, groups, group, block, SIDE: tl.constexpr, N: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    inside, follows = i < size, row % block > 0
    here = deltas + (row * 4 + SIDE * 2) * groups + i // group
    now = tl.load(z + row * size + i, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(z + row * size - size + i, mask=inside & follows, other=0.0).to(tl.float32)
    tap = tl.load(base + SIDE * 2 * size + i, mask=inside, other=0.0).to(tl.float32)
    tap_before = tl.load(base + (SIDE * 2 + 1) * size + i, mask=inside, other=0.0).to(tl.float32)
    tap += tl.load(here, mask=inside, other=0.0).to(tl.float32)
    tap_before += tl.load(here + groups, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, (tap * now + tap_before * before).to(out.dtype.element_ty), mask=inside)


def two_taps(z: Tensor, base: Tensor, deltas: Tensor, side: int, rows: int) -> Tensor:
    """As kernels.convolution.two_taps, for z `[R, H]` and deltas `[R, 4 H / group]`, all contiguous."""
    count, size = z.shape
    groups, out = deltas.shape[1] // 4, torch.empty_like(z)
    grid = count, triton.cdiv(size, BLOCK)
    two_taps_kernel[grid](z, base, deltas, out, size, groups, size // groups, rows, SIDE=side, N=BLOCK, num_warps=4)
    return out
