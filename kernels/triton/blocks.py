# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Linear layers on a GPU whose weights are in blocks or groups of 4 to 8 bits (kernels/block_tiles.py), and their rows.

As in linear.py a tile is `W [BLOCK_N, K] @ xᵀ [K, BLOCK_M]` in one order along K, whatever the number of rows. The left
operand are the integers of the blocks, less their zero points, which fp16 and bf16 represent exactly, or floats of 8
bits; scales and offsets never become 16-bit numbers. For groups in order, each of weights scale * q + offset:

    total = fma(sum of x over the group, offset, total), in formats with offsets
    total = fma(sum of q x over the group, scale, total)

Both sums are in fp32, of 16 columns after the other; a group of more than 128 columns counts as several. Tensor cores
also compute that of x, as a product with ones: a reduction would add in an order that follows from the tile. With rows
in fp32 the products are fp32's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.block_tiles import PANEL, WIDTH, BlockTiles, Storage
from kernels.elementwise import Gate
from kernels.triton import INTERPRETED
from kernels.triton.dependent import follow, launched, overlaps, prefetch
from kernels.triton.device import Limits, limits
from kernels.triton.elementwise import gate_mul
from kernels.triton.launch import Variant
from kernels.triton.linear import Tile, finish, fitting, lines, load_tile

AHEAD = tl.constexpr(8)  # tiles along K that a program fetches into L2 while the kernel ahead of it ends
LANES, INPUTS = tl.constexpr(PANEL), tl.constexpr(WIDTH)  # of a tile


@triton.jit
def half(word, place):
    """Return fp16 number `place` (0 or 1) of words, as fp32."""
    return (word >> (16 * place)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def factors(scales, g, SCALES: tl.constexpr):
    """Return scale and offset, fp32, of group g of the tile at whose first words `scales` points.

    Of scales with zero points the second is the zero point; without either it has no meaning.
    """
    if SCALES == "half":
        scale = half(tl.load(scales + g // 2 * LANES), g % 2)
        offset = scale
    elif SCALES == "bfloat":
        scale = (tl.load(scales + g // 2 * LANES) >> (16 * (g % 2)) << 16).to(tl.float32, bitcast=True)
        offset = scale
    elif SCALES == "float":
        scale = tl.load(scales + g * LANES).to(tl.float32, bitcast=True)
        offset = scale
    elif SCALES == "half_zero":
        word = tl.load(scales + g * LANES)
        scale, offset = half(word, 0), (word >> 16).to(tl.float32)
    elif SCALES == "bfloat_zero":
        word = tl.load(scales + g * LANES)
        scale, offset = (word << 16).to(tl.float32, bitcast=True), (word >> 16).to(tl.float32)
    elif SCALES == "float_zero":
        scale = tl.load(scales + 2 * g * LANES).to(tl.float32, bitcast=True)
        offset = tl.load(scales + (2 * g + 1) * LANES).to(tl.float32)
    elif SCALES == "half_offset":
        word = tl.load(scales + g * LANES)
        scale, offset = half(word, 0), half(word, 1)
    elif SCALES == "super_offset":
        both = tl.load(scales)
        high = tl.load(scales + 3 * LANES)
        scale_bits = (tl.load(scales + LANES) >> (4 * g)) & 15
        offset_bits = (tl.load(scales + 2 * LANES) >> (4 * g)) & 15
        scale_bits |= ((high >> (2 * g)) & 3) << 4
        offset_bits |= ((high >> (2 * g + 16)) & 3) << 4
        scale = half(both, 0) * scale_bits.to(tl.float32)
        offset = -half(both, 1) * offset_bits.to(tl.float32)
    else:
        word = tl.load(scales + (1 + g // 4) * LANES)
        factor = tl.load(scales).to(tl.float32, bitcast=True)
        scale = factor * ((word << (24 - 8 * (g % 4))) >> 24).to(tl.float32)
        offset = scale
    return scale, offset


@triton.jit
def integers(
    words, upper, zero, h: tl.constexpr, BITS: tl.constexpr, UPPER: tl.constexpr, SIGNED: tl.constexpr,
    ZERO: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """Return number `h` of every word, in fp32, less `zero` if ZERO; `upper`: the words of further bits, if there are
    any. FLOATS: it is a float8_e4m3fn, whose bits are those of an fp16 number 2^8 times as small.

    Its bits stay where they are, or go 16 places down, and become the last ones of a number from 2^23 to 2^24, which is
    scaled and reduced exactly: two instructions in place of three and a conversion at a quarter of their rate.
    """
    p: tl.constexpr = BITS * h % 16
    if BITS * h >= 16:
        words = words >> 16
    if FLOATS:
        bits = (words << (8 - p) & 0x8000) | (words << 7 >> p & 0x3F80)
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        bits = words & ((2**BITS - 1) << p)
        if UPPER:
            left: tl.constexpr = p + BITS - UPPER * h
            shifted = upper << left if left >= 0 else upper >> -left
            bits |= shifted & ((2**UPPER - 1) << (p + BITS))
        bias: tl.constexpr = 2.0 ** (BITS + UPPER - 1) * SIGNED
        number = (bits | 0x4B000000).to(tl.float32, bitcast=True)
        less = tl.full(number.shape, -(2.0 ** (23 - p)) - bias, tl.float32)
        if ZERO:
            less -= zero
        number = tl.fma(number, tl.full(number.shape, 2.0**-p, tl.float32), less)
    return number


@triton.jit
def load_columns(inputs, in_m, k, left, h: tl.constexpr, WHOLE_K: tl.constexpr, DTYPE: tl.constexpr):
    """Load columns k `[COLUMNS]` of piece h of a tile, of which `left` exist."""
    COLUMNS: tl.constexpr = k.shape[0]
    mask = in_m[None, :]
    if not WHOLE_K:
        mask &= (k < left - h * COLUMNS)[:, None]
    return tl.load(inputs + h * COLUMNS, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def block_product(
    words, upper, scales, place, lane, inputs, in_m, K,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr, SHARING: tl.constexpr,
    WHOLE_K: tl.constexpr, BITS: tl.constexpr, UPPER: tl.constexpr, SIGNED: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr, FLOATS: tl.constexpr,
    DTYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile `W xᵀ` in fp32 from the places of the first words `[BLOCK_N, COLUMNS]` and of the first scale of
    each output `[BLOCK_N]`, and pointers to the inputs of the first columns `[COLUMNS, BLOCK_M]`. WORDS: of the scales
    of SHARING tiles.
    """
    k = tl.arange(0, COLUMNS)
    SPLIT: tl.constexpr = GROUP // COLUMNS  # products of a group
    GROUPS: tl.constexpr = INPUTS // GROUP
    STEP: tl.constexpr = GROUPS * (GROUP < INPUTS)  # groups of tiles that share scales, from tile to tile
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ones = tl.full([BLOCK_N, COLUMNS], 1.0, DTYPE)
    for tile in tl.range(0, tl.cdiv(K, INPUTS), num_stages=STAGES):
        start = tile * INPUTS
        first = tile % SHARING * STEP
        w = tl.load(words + place)
        u = w
        if UPPER:
            u = tl.load(upper + place).to(tl.int32)
        for g in tl.static_range(GROUPS):
            scale, offset = factors(scales + (tile // SHARING * WORDS) * LANES + lane, first + g, SCALES)
            if OFFSET:  # before the integers are used, so that registers hold one of the two products
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for h in tl.static_range(g * SPLIT, (g + 1) * SPLIT):
                    x = load_columns(inputs, in_m, k, K - start, h, WHOLE_K, DTYPE)
                    sums = tl.dot(ones, x, sums, input_precision="ieee")
                total = tl.fma(sums, tl.broadcast_to(offset[:, None], [BLOCK_N, BLOCK_M]), total)
            part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for h in tl.static_range(g * SPLIT, (g + 1) * SPLIT):
                x = load_columns(inputs, in_m, k, K - start, h, WHOLE_K, DTYPE)
                q = integers(w, u, offset[:, None], h, BITS, UPPER, SIGNED, ZERO, FLOATS).to(DTYPE)
                part = tl.dot(q, x, part, input_precision="ieee")
            total = tl.fma(part, tl.broadcast_to(scale[:, None], [BLOCK_N, BLOCK_M]), total)
        words += LANES * COLUMNS
        if UPPER:
            upper += LANES * COLUMNS
        inputs += INPUTS
    return total


@triton.jit(do_not_specialize=["rows"])
def block_linear_kernel(
    x,
    words,
    upper,
    scales,
    bias,
    residual,
    out,
    rows,
    x_stride,
    residual_stride,
    out_stride,
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARING: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    SIGNED: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSET: tl.constexpr,
    ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store `[rows, N]`; GATED: from weights `[2 N, K]`, of gate and up."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, in_n = lines(N, BLOCK_N, GATED)
    k = tl.arange(0, COLUMNS)
    in_m = m < rows
    tiles = tl.cdiv(K, INPUTS)
    lane = tl.where(in_n, n, 0)  # a panel is whole, so loads of weights need no mask
    panel = lane // LANES * tiles
    place = panel * (LANES * COLUMNS) + lane % LANES * COLUMNS
    if PDL:
        ahead = tl.minimum(tl.arange(0, AHEAD), tiles - 1)
        prefetch(words + place[:, None] + ahead[None, :] * (LANES * COLUMNS))
    follow(PDL)
    EARLY: tl.constexpr = BLOCK_M < 128  # as in linear.py
    before = None
    if ADDED and EARLY:
        before = load_tile(residual, residual_stride, m, n, in_m, in_n)
    total = block_product(
        words, upper, scales, place[:, None] + k[None, :], panel // SHARING * (WORDS * LANES) + lane % LANES,
        x + m.to(tl.int64)[None, :] * x_stride + k[:, None], in_m, K,
        BLOCK_N, BLOCK_M, COLUMNS, WORDS, SHARING, WHOLE_K, BITS, UPPER, SIGNED, GROUP, SCALES, OFFSET,
        ZERO, FLOATS, tl.float32 if UPCAST else x.dtype.element_ty, STAGES,
    )  # fmt: skip
    finish(
        total, before, bias, residual, residual_stride, out, out_stride, m, n, in_m, in_n, N,
        BLOCK_N, BLOCK_M, BIASED, ADDED, EARLY, GATED, GELU,
    )  # fmt: skip


@triton.jit
def block_rows_kernel(
    ids,
    words,
    upper,
    scales,
    out,
    K,
    tiles,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARING: tl.constexpr,
    BITS: tl.constexpr,
    UPPER: tl.constexpr,
    SIGNED: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSET: tl.constexpr,
    ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """One program per row and tile."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, j = tl.load(ids + row), tl.arange(0, COLUMNS)
    index, lane = n // LANES * tiles + tile, n % LANES
    place = (index * LANES + lane) * COLUMNS + j
    w = tl.load(words + place)
    u = w
    if UPPER:
        u = tl.load(upper + place).to(tl.int32)
    STEP: tl.constexpr = INPUTS // GROUP * (GROUP < INPUTS)
    for h in tl.static_range(32 // BITS):
        g = tile % SHARING * STEP + h * COLUMNS // GROUP
        scale, offset = factors(scales + index // SHARING * (WORDS * LANES) + lane, g, SCALES)
        value = integers(w, u, offset, h, BITS, UPPER, SIGNED, ZERO, FLOATS) * scale
        if OFFSET:
            value += offset
        k = tile * INPUTS + h * COLUMNS + j
        tl.store(out + row * K + k, value.to(out.dtype.element_ty), mask=k < K)


class Layout(NamedTuple):
    """What a launch depends on of tiled weights."""

    storage: Storage
    outputs: int
    inputs: int
    columns: int  # words of an output in a tile
    upper: int  # bytes of a word of further bits
    words: int  # of an output's scales, for the tiles that share them


def layout_of(part: BlockTiles) -> Layout:
    upper = 0 if part.upper is None else part.upper.itemsize
    return Layout(part.storage, part.outputs, part.inputs, part.words.shape[3], upper, part.scales.shape[2])


def block_tile_for(rows: int, x: torch.dtype, part: Layout, device: Limits) -> Tile:
    """Return the tile of a launch; `k` is that of the weights, which affects no bits."""
    if x == torch.float32:  # no tensor cores
        return Tile(n=32, m=16 if rows <= 16 else 32, k=WIDTH, warps=4, stages=2)
    weights = part.columns * (4 + part.upper) + 4 * part.words  # bytes of an output

    def stage(n: int, m: int) -> int:
        return n * weights + m * WIDTH * x.itemsize

    return fitting(rows, part.outputs, WIDTH, stage, device, most=32, stages=8)  # more rows spill


def block_linear(
    x: Tensor,
    parts: Sequence[BlockTiles],
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gate: Gate | None = None,
) -> Tensor:
    """x `[M, K]` with any row stride, in fp32, fp16 or bf16, weights `[N, K]` of parts below one another -> `[M, N]`.

    bias, residual and gate as in kernels.triton.linear.linear. A launch for each part, and with a gate another one if
    there are several.
    """
    assert residual is None or gate is None, "no layer does both"
    if gate is not None and len(parts) > 1:
        return gate_mul(block_linear(x, parts, bias), gelu=gate == "gelu")
    outputs = sum(part.outputs for part in parts) // (2 if gate else 1)
    out, first = x.new_empty(x.shape[0], outputs), 0
    for part in parts:
        last = first + part.outputs
        columns = None if bias is None else bias[first:last]
        before = None if residual is None else residual[:, first:last]
        _launch(x, part, columns, before, gate, out[:, first:])
        first = last
    return out


def _launch(
    x: Tensor, part: BlockTiles, bias: Tensor | None, residual: Tensor | None, gate: Gate | None, out: Tensor
) -> None:
    x = x if part.order is None else x[:, part.order]
    rows, columns = x.shape[0], part.outputs // 2 if gate else part.outputs
    flags = bias is not None, residual is not None, gate, overlaps(x.device)
    variant, grid = _variant(rows, x.dtype, layout_of(part), limits(x.device), *flags)
    stride = 0 if residual is None else residual.stride(0)
    weights = part.words, part.upper, part.scales
    sizes = rows, x.stride(0), stride, out.stride(0), part.inputs, columns
    variant.launch(grid, x, *weights, bias, residual, out, *sizes)


@functools.cache
def _variant(
    rows: int, x: torch.dtype, part: Layout, device: Limits, biased: bool, added: bool, gate: Gate | None, pdl: bool
) -> tuple[Variant, tuple[int, int]]:
    """Return the kernel for a layer and number of rows, and its grid."""
    tile = block_tile_for(rows, x, part, device)
    grid = -(-rows // tile.m), -(-part.outputs // tile.n)
    return _variant_of_tile(tile, part, biased, added, gate, x == torch.bfloat16 and INTERPRETED, pdl), grid


@functools.cache
def _variant_of_tile(
    tile: Tile, part: Layout, biased: bool, added: bool, gate: Gate | None, upcast: bool, pdl: bool
) -> Variant:
    constants = {
        "BLOCK_N": tile.n, "BLOCK_M": tile.m, "WHOLE_K": part.inputs % WIDTH == 0, "BIASED": biased, "ADDED": added,
        "GATED": gate is not None, "GELU": gate == "gelu", "STAGES": tile.stages, "UPCAST": upcast, "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": 255, "enable_fp_fusion": False}
    return Variant(block_linear_kernel, constants | _constants(part), **options, **launched(pdl))


def block_rows(part: BlockTiles, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `ids` int64 `[R]` of the weights, `[R, K]`, each value rounded once, in the order of the tiles."""
    out = torch.empty(len(ids), part.inputs, dtype=dtype, device=ids.device)
    tiles = part.words.shape[1]
    block_rows_kernel[(len(ids), tiles)](
        ids,
        part.words,
        part.upper,
        part.scales,
        out,
        part.inputs,
        tiles,
        enable_fp_fusion=False,
        num_warps=1,
        **_constants(layout_of(part)),
    )
    return out


def _constants(part: Layout) -> dict[str, int | str]:
    storage = part.storage
    return {
        "COLUMNS": part.columns,
        "WORDS": part.words,
        "SHARING": storage.sharing,
        "BITS": storage.bits,
        "UPPER": storage.upper,
        "SIGNED": storage.signed,
        "GROUP": min(storage.group, WIDTH),
        "SCALES": storage.scales,
        "OFFSET": storage.offset,
        "ZERO": storage.zero,
        "FLOATS": storage.floats,
    }
