# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""`y = x Wᵀ + b` on a GPU, weights streamed once for up to 64 rows, in one order along K for any number of rows.

A tile is `W [BLOCK_N, BLOCK_K] @ xᵀ [BLOCK_K, BLOCK_M]`: weights are the left operand, which has at least 64 lines on
Hopper's tensor cores, and rows the right operand, which may have 16. So any number of rows, a prompt's too, uses the
same instructions in the same order along K, with one accumulator per output; BLOCK_N and BLOCK_M do not affect the
bits. K is not split. Weights in fewer bits have a kernel of their own (blocks.py).

What follows a product in a layer is done before its outputs are stored, which saves a launch each: the gate's
activation times up, and the sum with the residual stream. Both round where the separate operations do, so the bits are
theirs. For the former a tile's lines are rows of gate and of up in turn, PAIR of each.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.elementwise import Gate
from kernels.triton import INTERPRETED
from kernels.triton.dependent import follow, launched, overlaps, prefetch
from kernels.triton.device import Limits, limits
from kernels.triton.elementwise import activate
from kernels.triton.launch import Variant

AHEAD = tl.constexpr(8)  # tiles along K that a program fetches into L2 while the kernel ahead of it ends
FILLED = 0.84  # share of the multiprocessors that the largest tiles must keep busy on average
PAIR = tl.constexpr(8)  # a thread of a tensor core's product holds two lines 8 apart: those of gate and up


class Tile(NamedTuple):
    """Tile sizes. Only `k` affects the bits; it is fixed per dtype."""

    n: int
    m: int
    k: int
    warps: int
    stages: int


def tile_for(rows: int, outputs: int, dtype: torch.dtype, device: Limits) -> Tile:
    """Return the tile for `rows` rows and weights `[outputs, K]` of a dtype, by what was fastest on an H100.

    Few programs must keep the memory busy: if each has a multiprocessor to itself, its tiles under way fill the shared
    memory; else two share it, and one reads while the other starts or ends.
    """
    if dtype == torch.float32:  # no tensor cores: small products
        return Tile(n=32, m=16 if rows <= 16 else 32, k=32, warps=4, stages=3)
    k = 128 // dtype.itemsize

    def programs(n: int, m: int) -> int:
        return -(-rows // m) * -(-outputs // n)

    def stages(n: int, m: int, most: int = 12) -> int:
        size, room = (n + m) * 128, device.shared_memory
        if programs(n, m) > device.multiprocessors and device.half_shared_memory >= 3 * size:
            room = device.half_shared_memory
        return min(room // size, most)

    n, m = 64, min(64, max(16, 1 << (rows - 1).bit_length()))  # 64: the fewest lines of a product on Hopper
    if rows <= 64 or programs(64, 64) <= device.multiprocessors:
        return Tile(n, m, k, warps=4, stages=stages(n, m))
    if device.warpgroups and programs(128, 64) <= device.multiprocessors:
        return Tile(128, 64, k, warps=8, stages=stages(128, 64, most=6))
    if not device.warpgroups and programs(64, 128) <= device.multiprocessors:
        return Tile(64, 128, k, warps=4, stages=stages(64, 128))
    large = programs(128, 256)
    waves = -(-large // device.multiprocessors)
    if device.warpgroups and rows > 128 and large >= FILLED * waves * device.multiprocessors:
        return Tile(128, 256, k, warps=8, stages=stages(128, 256))
    return Tile(128, 128, k, warps=8, stages=stages(128, 128))


@triton.jit
def product(
    weights, inputs, in_n, in_m, K,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute a tile `W xᵀ` in fp32 from pointers to its first weights `[BLOCK_N, BLOCK_K]` and inputs
    `[BLOCK_K, BLOCK_M]`.
    """
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        if WHOLE_K:
            w = tl.load(weights, mask=in_n[:, None], other=0.0)
            a = tl.load(inputs, mask=in_m[None, :], other=0.0)
        else:
            in_k = k < K - start
            w = tl.load(weights, mask=in_n[:, None] & in_k[None, :], other=0.0)
            a = tl.load(inputs, mask=in_m[None, :] & in_k[:, None], other=0.0)
        if UPCAST:
            w, a = w.to(tl.float32), a.to(tl.float32)
        total = tl.dot(w, a, total, input_precision="ieee")
        weights += BLOCK_K
        inputs += BLOCK_K
    return total


@triton.jit
def load_tile(rows, stride, m, n, in_m, in_n):
    """Load columns n of the rows m, as `[BLOCK_N, BLOCK_M]`."""
    mask = in_n[:, None] & in_m[None, :]
    return tl.load(rows + m.to(tl.int64)[None, :] * stride + n[:, None], mask=mask, other=0.0)


@triton.jit
def lines(N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return a tile's rows of the weight `[N, K]`, and which of them exist; GATED: of `[2 N, K]`, gate and up."""
    line = tl.arange(0, BLOCK_N)
    if GATED:
        column = tl.program_id(1) * (BLOCK_N // 2) + line // (2 * PAIR) * PAIR + line % PAIR
        in_n = column < N
        n = column + line // PAIR % 2 * N
    else:
        n = tl.program_id(1) * BLOCK_N + line
        in_n = n < N
    return n, in_n


@triton.jit
def finish(
    total, before, bias, residual, residual_stride, out, out_stride, m, n, in_m, in_n, N,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Store a tile of sums `[BLOCK_N, BLOCK_M]`. EARLY: the residual stream's tile has been read, it is `before`."""
    dtype = out.dtype.element_ty
    if BIASED:
        total = total + tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    value = total.to(dtype)
    if ADDED and EARLY:
        value = (before.to(tl.float32) + value.to(tl.float32)).to(dtype)
    elif ADDED:  # by halves: of fp32 registers do not hold another tile
        values = tl.split(value.reshape(BLOCK_N, 2, BLOCK_M // 2).permute(0, 2, 1))
        rows = tl.split(m.reshape(2, BLOCK_M // 2).permute(1, 0))
        inside = tl.split(in_m.reshape(2, BLOCK_M // 2).permute(1, 0))
        for half in tl.static_range(2):
            before = load_tile(residual, residual_stride, rows[half], n, inside[half], in_n).to(tl.float32)
            destination = out + rows[half].to(tl.int64)[None, :] * out_stride + n[:, None]
            added = (before + values[half].to(tl.float32)).to(dtype)
            tl.store(destination, added, mask=in_n[:, None] & inside[half][None, :])
        return
    if GATED:
        pairs = value.to(tl.float32).reshape(BLOCK_N // (2 * PAIR), 2, PAIR, BLOCK_M).permute(0, 2, 3, 1)
        gate, up = tl.split(pairs)
        value = (activate(gate, GELU).to(dtype).to(tl.float32) * up).to(dtype).reshape(BLOCK_N // 2, BLOCK_M)
        n = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        in_n = n < N
    destination = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(destination, value, mask=in_n[:, None] & in_m[None, :])


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    x_stride,
    residual_stride,
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store `[rows, N]`; GATED: from weights `[2 N, K]`, of gate and up."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, in_n = lines(N, BLOCK_N, GATED)
    k = tl.arange(0, BLOCK_K)
    in_m = m < rows
    if PDL:
        ahead = tl.minimum(tl.arange(0, AHEAD) * BLOCK_K, K - 1)
        prefetch(weight + tl.where(in_n, n, 0).to(tl.int64)[:, None] * K + ahead[None, :])
    follow(PDL)
    EARLY: tl.constexpr = BLOCK_M < 128  # read before the product, which hides it; larger tiles lack the registers
    before = None
    if ADDED and EARLY:
        before = load_tile(residual, residual_stride, m, n, in_m, in_n)
    inputs = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    weights = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    total = product(weights, inputs, in_n, in_m, K, BLOCK_N, BLOCK_M, BLOCK_K, WHOLE_K, UPCAST)
    finish(
        total, before, bias, residual, residual_stride, out, N, m, n, in_m, in_n, N,
        BLOCK_N, BLOCK_M, BIASED, ADDED, EARLY, GATED, GELU,
    )  # fmt: skip


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gate: Gate | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x `[M, K]` with any row stride, weight `[N, K]`, bias `[N]` -> `[M, N]`. x's dtype: fp32, fp16 or bf16.

    residual `[M, N]`, with any row stride, is added. With `gate` the first half of the N outputs, activated, is
    multiplied by the second: `[M, N / 2]`. `out_dtype`: of the output, by default x's; fp32 leaves the sums unrounded.
    """
    assert residual is None or gate is None, "no layer does both"
    rows, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
    flags = bias is not None, residual is not None, gate, overlaps(x.device)
    variant, grid = _variant(rows, inputs, outputs, x.dtype, limits(x.device), *flags)
    columns = outputs // 2 if gate else outputs
    out = x.new_empty(rows, columns, dtype=out_dtype)
    stride = 0 if residual is None else residual.stride(0)
    variant.launch(grid, x, weight, bias, residual, out, rows, x.stride(0), stride, inputs, columns)
    return out


@functools.cache
def _variant(
    rows: int, inputs: int, outputs: int, x: torch.dtype, device: Limits,
    biased: bool, added: bool, gate: Gate | None, pdl: bool,
) -> tuple[Variant, tuple[int, int]]:  # fmt: skip
    """Return the kernel for a layer and number of rows, and its grid."""
    tile = tile_for(rows, outputs, x, device)
    upcast = x == torch.bfloat16 and INTERPRETED
    variant = _variant_of_tile(tile, inputs % tile.k == 0, biased, added, gate, upcast, pdl)
    return variant, (-(-rows // tile.m), -(-outputs // tile.n))


@functools.cache
def _variant_of_tile(
    tile: Tile, whole_k: bool, biased: bool, added: bool, gate: Gate | None, upcast: bool, pdl: bool
) -> Variant:
    constants = {
        "BLOCK_N": tile.n, "BLOCK_M": tile.m, "BLOCK_K": tile.k, "WHOLE_K": whole_k, "BIASED": biased, "ADDED": added,
        "GATED": gate is not None, "GELU": gate == "gelu", "UPCAST": upcast, "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return Variant(linear_kernel, constants, **options, **launched(pdl))
