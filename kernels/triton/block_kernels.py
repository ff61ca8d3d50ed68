# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Kernels of linear layers whose weights are in blocks or groups of 4 to 8 bits; blocks.py launches them.

As in linear.py a tile is `W [BLOCK_N, K] @ xᵀ [K, BLOCK_M]` in one order along K, whatever the number of rows. The left
operand are the integers of the blocks, less their zero points, which fp16 and bf16 represent exactly, or floats of 8
bits; scales and offsets never become 16-bit numbers. For groups in order, each of weights scale * q + offset:

    total = fma(sum of x over the group, offset, total), in formats with offsets
    total = fma(sum of q x over the group, scale, total)

Both sums are in fp32, of 16 columns after the other; a group of more than 128 columns counts as several. Tensor cores
also compute that of x, as a product with ones: a reduction would add in an order that follows from the tile. With rows
in fp32 the products are fp32's.

K is divided into PARTS parts, whose totals are added in order. Where a launch would have too few programs to keep the
memory busy, each part is a program of its own, and a second launch adds them; else one program goes through all parts.
The bits are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.dependent import follow, prefetch
from kernels.triton.linear import finish, lines, load_tile
from kernels.weights.ggml_tiles import PANEL, WIDTH

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
    words, upper, scales, place, lane, inputs, in_m, first_tile, last_tile, part_tiles, K,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr, SHARING: tl.constexpr,
    WHOLE_K: tl.constexpr, BITS: tl.constexpr, UPPER: tl.constexpr, SIGNED: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr, FLOATS: tl.constexpr,
    DTYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile `W xᵀ` in fp32 over some tiles along K, a part being `part_tiles` of them.

    From the places of the first words `[BLOCK_N, COLUMNS]` and of the first scale of each output `[BLOCK_N]`, both of
    tile 0, and pointers to the inputs of its columns `[COLUMNS, BLOCK_M]`. WORDS: of the scales of SHARING tiles.
    """
    k = tl.arange(0, COLUMNS)
    SPLIT: tl.constexpr = GROUP // COLUMNS  # products of a group
    GROUPS: tl.constexpr = INPUTS // GROUP
    STEP: tl.constexpr = GROUPS * (GROUP < INPUTS)  # groups of tiles that share scales, from tile to tile
    words += first_tile.to(tl.int64) * (LANES * COLUMNS)
    if UPPER:
        upper += first_tile.to(tl.int64) * (LANES * COLUMNS)
    inputs += first_tile * INPUTS
    parts = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # the sum of those that are complete
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ones = tl.full([BLOCK_N, COLUMNS], 1.0, DTYPE)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        if tile % part_tiles == 0:
            parts += total
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
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
    return parts + total


@triton.jit(do_not_specialize=["rows"])
def ggml_linear_kernel(
    x,
    words,
    upper,
    scales,
    bias,
    residual,
    out,
    partial,
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
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store `[rows, N]`; GATED: from weights `[2 N, K]`, of gate and up. SPLIT: a part of K, into
    `partial` `[parts, rows, lines of all tiles]`.
    """
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
    EARLY: tl.constexpr = BLOCK_M < 128 and not SPLIT  # as in linear.py
    before = None
    if ADDED and EARLY:
        before = load_tile(residual, residual_stride, m, n, in_m, in_n)
    part_tiles = tl.cdiv(tiles, PARTS)
    first_tile, last_tile = tl.program_id(2) * part_tiles, tiles
    if SPLIT:
        last_tile = tl.minimum(first_tile + part_tiles, tiles)
    total = block_product(
        words, upper, scales, place[:, None] + k[None, :], panel // SHARING * (WORDS * LANES) + lane % LANES,
        x + m.to(tl.int64)[None, :] * x_stride + k[:, None], in_m, first_tile, last_tile, part_tiles, K,
        BLOCK_N, BLOCK_M, COLUMNS, WORDS, SHARING, WHOLE_K, BITS, UPPER, SIGNED, GROUP, SCALES, OFFSET,
        ZERO, FLOATS, tl.float32 if UPCAST else x.dtype.element_ty, STAGES,
    )  # fmt: skip
    if SPLIT:
        line = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.program_id(2) * rows + m
        destination = partial + row.to(tl.int64)[None, :] * (tl.num_programs(1) * BLOCK_N) + line[:, None]
        tl.store(destination, total, mask=in_m[None, :])
    else:
        finish(
            total, before, bias, residual, residual_stride, out, out_stride, m, n, in_m, in_n, N,
            BLOCK_N, BLOCK_M, BIASED, ADDED, EARLY, GATED, GELU,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def add_parts_kernel(
    partial,
    bias,
    residual,
    out,
    rows,
    residual_stride,
    out_stride,
    parts,
    N,
    partial_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add `partial` `[parts, rows, partial_stride]`, the totals of the parts of K, and store `[rows, N]` as
    `ggml_linear_kernel` does.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, in_n = lines(N, BLOCK_N, GATED)
    line, in_m = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), m < rows
    follow(PDL)
    before = None
    if ADDED:
        before = load_tile(residual, residual_stride, m, n, in_m, in_n)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for part in range(parts):
        row = part * rows + m
        source = partial + row.to(tl.int64)[None, :] * partial_stride + line[:, None]
        total += tl.load(source, mask=(line < partial_stride)[:, None] & in_m[None, :], other=0.0)
    finish(
        total, before, bias, residual, residual_stride, out, out_stride, m, n, in_m, in_n, N,
        BLOCK_N, BLOCK_M, BIASED, ADDED, True, GATED, GELU,
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
