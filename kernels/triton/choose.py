# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Sampling in Triton: one pass over the vocabulary in blocks, and one over the candidates of the blocks.

A block keeps its logits in registers, adds the noise there, and returns its few best columns: nothing as wide as the
vocabulary is written. Top-k and top-p need a threshold, which is found by radix selection: a value's 32 bits, mapped to
integers of the same order, four at a time from the top; each step is a pass that counts, or weighs, the values with the
digits so far. There is no sorting and no atomic addition, and counts and weights are integers, whose sums do not depend
on an order: a row's choice depends on that row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.noise import exact_log
from kernels.triton.fixed_point import exp_weights, share_of
from kernels.triton.noise import gumbel_noise, row_key

if TYPE_CHECKING:
    from kernels.choose import ChoiceParameters

BLOCK = 2048
DIGITS = tl.constexpr(16)
LEVELS = 8
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def read_scaled(logits, row, stride, columns, size, temperature):
    """Read a row's logits divided by its temperature [N], in fp32, -inf past its end; a greedy row's unchanged."""
    x = tl.load(logits + row * stride + columns, mask=columns < size, other=MINUS_INFINITY).to(tl.float32)
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def best_of_block(
    logits, stride, size, temperatures, thresholds, seeds_low, seeds_high, positions, token_ids, block_keys,
    block_columns, peaks, masses,
    M: tl.constexpr, N: tl.constexpr, SAMPLED: tl.constexpr, RESTRICTED: tl.constexpr, NOISE: tl.constexpr,
    IDS: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Find the M largest keys of each row and block and their columns, lowest column first among equals.

    With MASS also the block's largest key and the sum of exp(key - largest).
    """
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = block * N + tl.arange(0, N)
    inside = columns < size
    if SAMPLED:
        temperature = tl.load(temperatures + row)
        keys = read_scaled(logits, row, stride, columns, size, temperature)
        if RESTRICTED:
            keys = tl.where(keys < tl.load(thresholds + row), MINUS_INFINITY, keys)
        if NOISE:
            key = row_key(tl.load(seeds_low + row), tl.load(seeds_high + row), tl.load(positions + row))
            if IDS:
                ids = tl.load(token_ids + columns, mask=inside, other=0)
            else:
                ids = columns.to(tl.int64)
            keys = tl.where(temperature > 0, keys + gumbel_noise(key, ids), keys)
    else:
        keys = tl.load(logits + row * stride + columns, mask=inside, other=MINUS_INFINITY).to(tl.float32)
    index = row * blocks + block
    if MASS:
        peak = tl.max(keys, axis=0)
        finite = tl.where(peak > MINUS_INFINITY, peak, 0.0)
        tl.store(peaks + index, peak)
        tl.store(masses + index, tl.sum(tl.exp(keys - finite), axis=0))
    value, column = float("inf"), -1
    for rank in range(M):
        remaining = inside & ((keys < value) | ((keys == value) & (columns > column)))
        value = tl.max(tl.where(remaining, keys, MINUS_INFINITY), axis=0)
        column = tl.min(tl.where(remaining & (keys == value), columns, size), axis=0)
        tl.store(block_keys + index * M + rank, value)
        tl.store(block_columns + index * M + rank, column)


@triton.jit
def best_of_row(
    block_keys, block_columns, peaks, masses, out, out_columns, out_mass, blocks, candidates, size,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Find the M best of a row's candidates; with MASS also the log-sum-exp of the row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, C)
    keys = tl.load(block_keys + row * candidates + index, mask=index < candidates, other=MINUS_INFINITY)
    columns = tl.load(block_columns + row * candidates + index, mask=index < candidates, other=size)
    value, column = float("inf"), -1
    for rank in range(M):
        remaining = (columns < size) & ((keys < value) | ((keys == value) & (columns > column)))
        value = tl.max(tl.where(remaining, keys, MINUS_INFINITY), axis=0)
        column = tl.min(tl.where(remaining & (keys == value), columns, size), axis=0)
        tl.store(out + row * M + rank, value)
        tl.store(out_columns + row * M + rank, tl.minimum(column, size - 1).to(tl.int64))
    if MASS:
        parts = tl.arange(0, P)
        peak = tl.load(peaks + row * blocks + parts, mask=parts < blocks, other=MINUS_INFINITY)
        mass = tl.load(masses + row * blocks + parts, mask=parts < blocks, other=0.0)
        max_peak = tl.max(peak, axis=0)
        finite = tl.where(max_peak > MINUS_INFINITY, max_peak, 0.0)
        total = tl.sum(tl.where(mass > 0, mass * tl.exp(peak - finite), 0.0), axis=0)
        tl.store(out_mass + row, finite + tl.log(total))


@triton.jit
def count_above(logits, stride, size, log_masses, bounds, out, N: tl.constexpr):
    """Count a block's log-probabilities above the row's bound."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = block * N + tl.arange(0, N)
    x = tl.load(logits + row * stride + columns, mask=columns < size, other=MINUS_INFINITY).to(tl.float32)
    above = x - tl.load(log_masses + row) > tl.load(bounds + row)
    tl.store(out + row * blocks + block, tl.sum(above.to(tl.int32), axis=0))


@triton.jit
def in_order(x):
    """Map fp32 to uint32 in the same order; -0 becomes +0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def from_order(code):
    bits = code.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def descend(sums, prefix, above, limit, row, blocks, first, P: tl.constexpr, WEIGHTED: tl.constexpr):
    """Find the next digit: the lowest with any mass and with less than `limit` above it.

    sums: the previous level's, of every block [blocks, 16]. With `first` a weighted limit is the bits of an fp32 share
    of the total mass.
    """
    parts, digits = tl.arange(0, P), tl.arange(0, DIGITS)
    index = (row * blocks + parts[:, None]) * DIGITS + digits[None, :]
    digit_sums = tl.sum(tl.load(sums + index, mask=parts[:, None] < blocks, other=0), axis=0)
    higher = above + tl.sum(tl.where(digits[:, None] > digits[None, :], digit_sums[:, None], 0), axis=0)
    if WEIGHTED:
        share = tl.where(first, limit, 0).to(tl.int32).to(tl.float32, bitcast=True)
        limit = tl.where(first, share_of(tl.sum(digit_sums, axis=0), share), limit)
    digit = tl.min(tl.where((digit_sums > 0) & (higher < limit), digits, DIGITS - 1), axis=0)
    return (prefix << 4) | digit.to(tl.uint32), tl.sum(tl.where(digits == digit, higher, 0), axis=0), limit


@triton.jit(do_not_specialize=["level"])
def count_digits(
    logits, stride, size, temperatures, tops, floors, requested, states, sums, level,
    N: tl.constexpr, P: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One level: count, or weigh, a row's values by their next digit, among those with the prefix so far.

    states [levels + 1, R, 3]: the prefix, the sum above it, the limit. sums [levels, R, blocks, 16]. int64 both.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, blocks = tl.num_programs(0), tl.num_programs(1)
    if tl.load(requested + row) == 0:
        return
    state = states + row * 3
    prefix = tl.full((), 0, tl.uint32)
    if level > 0:
        old = state + (level - 1) * rows * 3
        before = sums + (level - 1).to(tl.int64) * rows * blocks * DIGITS
        prefix, above, limit = descend(
            before, tl.load(old).to(tl.uint32), tl.load(old + 1), tl.load(old + 2), row, blocks, level == 1, P, WEIGHTED
        )
        if block == 0:
            new = state + level * rows * 3
            tl.store(new, prefix.to(tl.int64))
            tl.store(new + 1, above)
            tl.store(new + 2, limit)
    columns = block * N + tl.arange(0, N)
    x = read_scaled(logits, row, stride, columns, size, tl.load(temperatures + row))
    code = in_order(x)
    shift = 28 - 4 * level
    counted = (columns < size) & (x >= tl.load(floors + row))
    if level > 0:
        counted = counted & ((code >> (shift + 4)) == prefix)
    if WEIGHTED:
        weight = tl.where(counted, exp_weights(x - tl.load(tops + row)), 0)
    else:
        weight = counted.to(tl.int64)
    digit = ((code >> shift) & 15).to(tl.int32)
    out = sums + ((level.to(tl.int64) * rows + row) * blocks + block) * DIGITS
    for value in range(DIGITS):
        tl.store(out + value, tl.sum(tl.where(digit == value, weight, 0), axis=0))


@triton.jit
def read_threshold(
    states, sums, requested, floors, out, blocks, LEVEL: tl.constexpr, P: tl.constexpr, WEIGHTED: tl.constexpr
):
    """After the last level: write the value of all digits, at least the floor; the floor for rows not `requested`."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    threshold = tl.load(floors + row)
    if tl.load(requested + row) != 0:
        old = states + ((LEVEL - 1) * rows + row) * 3
        code, _, _ = descend(
            sums + (LEVEL - 1) * rows.to(tl.int64) * blocks * DIGITS, tl.load(old).to(tl.uint32), tl.load(old + 1),
            tl.load(old + 2), row, blocks, LEVEL == 1, P, WEIGHTED,
        )  # fmt: skip
        threshold = tl.maximum(threshold, from_order(code))
    tl.store(out + row, threshold)


def best(
    logits: Tensor,
    parameters: ChoiceParameters | None,
    positions: Tensor,
    token_ids: Tensor | None,
    count: int,
    *,
    mass: bool = False,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the `count` largest keys of each row of logits `[R, V]` and their columns, `[R, count]` each.

    Ties go to the lowest column. With `mass` also the log-sum-exp of all keys, `[R]`. Arguments as for
    kernels.choose.choose.
    """
    thresholds = None
    if parameters is not None and parameters.restricts:
        thresholds = find_thresholds(logits, parameters, block)
    return best_columns(logits, parameters, positions, token_ids, count, thresholds, mass=mass, noise=True, block=block)


def logprobs(logits: Tensor, tokens: Tensor, top: int, block: int = BLOCK) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As kernels.choose.logprobs."""
    count = max(top, 1)
    keys, columns, log_mass = best_columns(logits, None, None, None, count, None, mass=True, noise=False, block=block)
    assert log_mass is not None
    token_logprobs = logits.gather(1, tokens[:, None])[:, 0].float() - log_mass
    rows, size = logits.shape
    above = torch.empty(rows, triton.cdiv(size, block), dtype=torch.int32, device=logits.device)
    count_above[above.shape](logits, logits.stride(0), size, log_mass, token_logprobs, above, N=block, num_warps=8)
    return token_logprobs, above.sum(1) + 1, columns[:, :top], keys[:, :top] - log_mass[:, None]


def best_columns(
    logits: Tensor,
    parameters: ChoiceParameters | None,
    positions: Tensor | None,
    token_ids: Tensor | None,
    count: int,
    thresholds: Tensor | None,
    *,
    mass: bool,
    noise: bool,
    block: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `best`, with precomputed thresholds `[R]` or None; without `noise` it ranks logits divided by temperature."""
    rows, size = logits.shape
    assert count <= size, "there are no more columns"
    assert logits.stride(1) == 1, "columns beside each other"
    blocks, device = triton.cdiv(size, block), logits.device
    block_keys = torch.empty(rows, blocks, count, device=device)
    columns = torch.empty(rows, blocks, count, dtype=torch.int32, device=device)
    peaks, masses = torch.empty(2, rows, blocks, device=device) if mass else (block_keys, block_keys)
    p = parameters
    best_of_block[rows, blocks](
        logits, logits.stride(0), size,
        block_keys if p is None else p.temperature, block_keys if thresholds is None else thresholds,
        columns if p is None else p.seed_low, columns if p is None else p.seed_high,
        columns if positions is None else positions, columns if token_ids is None else token_ids,
        block_keys, columns, peaks, masses,
        M=count, N=block, SAMPLED=p is not None, RESTRICTED=thresholds is not None, NOISE=noise,
        IDS=token_ids is not None, MASS=mass, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    keys = torch.empty(rows, count, device=device)
    row_columns = torch.empty(rows, count, dtype=torch.int64, device=device)
    log_mass = torch.empty(rows, device=device) if mass else None
    best_of_row[rows,](
        block_keys, columns, peaks, masses, keys, row_columns, keys if log_mass is None else log_mass,
        blocks, blocks * count, size,
        M=count, C=triton.next_power_of_2(blocks * count), P=triton.next_power_of_2(blocks), MASS=mass, num_warps=8,
    )  # fmt: skip
    return keys, row_columns, log_mass


def find_thresholds(logits: Tensor, parameters: ChoiceParameters, block: int = BLOCK) -> Tensor:
    """Return the least logit divided by temperature that min-p, then top-k, then top-p keep, `[R]`."""
    p, disabled = parameters, float("-inf")
    tops, _, _ = best_columns(logits, p, None, None, 1, None, mass=False, noise=False, block=block)
    tops, sampled = tops[:, 0], p.temperature > 0
    floors = torch.where((p.min_p > 0) & sampled, tops + exact_log(p.min_p), disabled)
    by_k = (p.top_k > 0) & sampled
    floors = threshold(logits, p.temperature, tops, floors, by_k, p.top_k, block, weighted=False)
    by_p, share_bits = (p.top_p < 1) & sampled, p.top_p.float().view(torch.int32)
    return threshold(logits, p.temperature, tops, floors, by_p, share_bits, block, weighted=True)


def threshold(
    logits: Tensor,
    temperature: Tensor,
    tops: Tensor,
    floors: Tensor,
    requested: Tensor,
    limit: Tensor,
    block: int,
    *,
    weighted: bool,
) -> Tensor:
    """Return the lowest value >= `floors` with less than `limit` above it.

    `limit` is a count or, `weighted`, the bits of an fp32 share of the mass.
    """
    rows, size = logits.shape
    blocks, device = triton.cdiv(size, block), logits.device
    sums = torch.empty(LEVELS, rows, blocks, 16, dtype=torch.int64, device=device)
    states = torch.zeros(LEVELS, rows, 3, dtype=torch.int64, device=device)
    states[0, :, 2] = limit
    requested, parts = requested.to(torch.int32), triton.next_power_of_2(blocks)
    for level in range(LEVELS):
        count_digits[rows, blocks](
            logits, logits.stride(0), size, temperature, tops, floors, requested, states, sums, level,
            N=block, P=parts, WEIGHTED=weighted, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    out = torch.empty_like(floors)
    read_threshold[rows,](states, sums, requested, floors, out, blocks, LEVEL=LEVELS, P=parts, WEIGHTED=weighted)
    return out
