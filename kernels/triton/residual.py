# pyright: reportCallIssue=false, reportArgumentType=false
"""`x + silu(W x + b)` of several heads in one launch, with the tiles and order along K of kernels/triton/linear.py."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import INTERPRETED
from kernels.triton.dependent import follow, launched, overlaps
from kernels.triton.device import Limits, limits
from kernels.triton.elementwise import activate
from kernels.triton.launch import Variant
from kernels.triton.linear import Tile, product, tile_for


@triton.jit(do_not_specialize=["rows"])
def residual_silu_kernel(
    x, weight, bias, out, rows, x_group, H,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, BIASED: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    group = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n, in_m = n < H, m < rows
    x += group * x_group
    weights = weight + group * H * H + n.to(tl.int64)[:, None] * H + k[None, :]
    inputs = x + m[None, :] * H + k[:, None]
    total = product(weights, inputs, in_n, in_m, H, BLOCK_N, BLOCK_M, BLOCK_K, WHOLE_K, UPCAST)
    if BIASED:
        total = total + tl.load(bias + group * H + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    value = total.to(dtype).to(tl.float32)
    active = activate(value, False).to(dtype).to(tl.float32)
    mask = in_n[:, None] & in_m[None, :]
    offset = m[None, :] * H + n[:, None]
    residual = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + group * rows * H + offset, (residual + active).to(dtype), mask=mask)


def residual_silu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As kernels.residual.residual_silu."""
    groups, size, _ = weight.shape
    x, rows = x.contiguous(), x.shape[1]
    biased, out = bias is not None, x.new_empty(groups, rows, size)
    variant, tile = _variant(groups, rows, size, x.dtype, limits(x.device), biased, overlaps(x.device))
    grid = -(-rows // tile.m), -(-size // tile.n), groups
    variant.launch(grid, x, weight, bias, out, rows, 0 if x.shape[0] == 1 else rows * size, size)
    return out


@functools.cache
def _variant(
    groups: int, rows: int, size: int, x: torch.dtype, device: Limits, biased: bool, pdl: bool
) -> tuple[Variant, Tile]:
    tile = tile_for(rows, groups * size, x, device)
    constants = {
        "BLOCK_N": tile.n, "BLOCK_M": tile.m, "BLOCK_K": tile.k, "WHOLE_K": size % tile.k == 0, "BIASED": biased,
        "UPCAST": x == torch.bfloat16 and INTERPRETED, "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return Variant(residual_silu_kernel, constants, **options, **launched(pdl)), tile
