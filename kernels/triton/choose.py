# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Sampling in Triton: one pass over the vocabulary in blocks, and one over the candidates of the blocks.

A block keeps its logits in registers, adds the noise there, and returns its few best columns: nothing as wide as the
vocabulary is written. Top-k and top-p need a threshold, which is found by radix selection: a logit's bits, mapped to
integers of the same order, four at a time from the top; each step is a pass that counts, or weighs, the logits with the
digits so far. 16-bit logits have only their highest bits, and division by the temperature keeps their order, so that
the threshold of the quotients is found in half the passes of fp32. There is no sorting and no atomic addition, and
counts and weights are integers, whose sums do not depend on an order: a row's choice depends on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import ChoiceParameters
from kernels.triton.device import empties
from kernels.triton.fixed_point import exp_weights, share_of
from kernels.triton.noise import exact_log, gumbel_noise, row_key

BLOCK = 2048
DIGITS = tl.constexpr(16)
RANKED = (1, 8, 32, 64)  # most likely tokens that a kernel finds; one is compiled for each, not for each request
LEVELS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}  # digits of four bits that any value needs, as fp32
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def divided(x, temperature):
    """x / temperature in fp32; a greedy row's x is unchanged."""
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def read_logits(logits, row, stride, columns, size):
    """Read a row's logits [N] in fp32, -inf past its end."""
    return tl.load(logits + row * stride + columns, mask=columns < size, other=MINUS_INFINITY).to(tl.float32)


@triton.jit(do_not_specialize=["repeat"])
def best_of_block(
    logits, stride, size, repeat, temperatures, thresholds, seeds_low, seeds_high, positions, token_ids, block_keys,
    block_columns, peaks, masses,
    M: tl.constexpr, N: tl.constexpr, SAMPLED: tl.constexpr, RESTRICTED: tl.constexpr, NOISE: tl.constexpr,
    IDS: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Find the M largest keys of each row and block and their columns, lowest column first among equals.

    With MASS also the block's largest key and the sum of exp(key - largest). IDS: 0 for columns that are token ids, 1
    for ids that rows share, 2 for ids of each row. A NaN ranks last; if a token is chosen, and not drafted, column -1
    ranks first in its place.
    """
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = block * N + tl.arange(0, N)
    inside = columns < size
    keys = read_logits(logits, row, stride, columns, size)
    if SAMPLED:
        owner = row // repeat  # whose parameters are the row's
        temperature = tl.load(temperatures + owner)
        keys = divided(keys, temperature)
        if RESTRICTED:
            keys = tl.where(keys < tl.load(thresholds + row), MINUS_INFINITY, keys)
        if NOISE:
            key = row_key(tl.load(seeds_low + owner), tl.load(seeds_high + owner), tl.load(positions + row))
            if IDS == 2:
                ids = tl.load(token_ids + row * size + columns, mask=inside, other=0)
            elif IDS == 1:
                ids = tl.load(token_ids + columns, mask=inside, other=0)
            else:
                ids = columns.to(tl.int64)
            keys = tl.where(temperature > 0, keys + gumbel_noise(key, ids), keys)
    index = row * blocks + block
    broken = keys != keys
    keys = tl.where(broken, MINUS_INFINITY, keys)
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
        if M == 1 and IDS == 0 and not MASS:
            refused = tl.max(broken.to(tl.int32), axis=0) > 0
            value, column = tl.where(refused, float("inf"), value), tl.where(refused, -1, column)
        tl.store(block_keys + index * M + rank, value)
        tl.store(block_columns + index * M + rank, column)


@triton.jit
def best_of_row(
    block_keys, block_columns, peaks, masses, token_ids, out, out_tokens, out_mass, blocks, candidates, size,
    M: tl.constexpr, C: tl.constexpr, P: tl.constexpr, IDS: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Find the M best of a row's candidates; with MASS also the log-sum-exp of the row, which is subtracted of keys."""
    row = tl.program_id(0).to(tl.int64)
    log_mass = 0.0
    if MASS:
        parts = tl.arange(0, P)
        peak = tl.load(peaks + row * blocks + parts, mask=parts < blocks, other=MINUS_INFINITY)
        mass = tl.load(masses + row * blocks + parts, mask=parts < blocks, other=0.0)
        max_peak = tl.max(peak, axis=0)
        finite = tl.where(max_peak > MINUS_INFINITY, max_peak, 0.0)
        log_mass = finite + tl.log(tl.sum(tl.where(mass > 0, mass * tl.exp(peak - finite), 0.0), axis=0))
        tl.store(out_mass + row, log_mass)
    index = tl.arange(0, C)
    keys = tl.load(block_keys + row * candidates + index, mask=index < candidates, other=MINUS_INFINITY)
    columns = tl.load(block_columns + row * candidates + index, mask=index < candidates, other=size)
    value, column = float("inf"), -2
    for rank in range(M):
        remaining = (columns < size) & ((keys < value) | ((keys == value) & (columns > column)))
        value = tl.max(tl.where(remaining, keys, MINUS_INFINITY), axis=0)
        column = tl.min(tl.where(remaining & (keys == value), columns, size), axis=0)
        tl.store(out + row * M + rank, value - log_mass)
        token = tl.minimum(column, size - 1).to(tl.int64)
        if IDS == 2:
            token = tl.load(token_ids + row * size + token)
        elif IDS == 1:
            token = tl.load(token_ids + token)
        tl.store(out_tokens + row * M + rank, token)


@triton.jit
def count_above(logits, stride, size, log_masses, bounds, out, N: tl.constexpr):
    """Count a block's log-probabilities above the row's bound."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = block * N + tl.arange(0, N)
    x = read_logits(logits, row, stride, columns, size)
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


@triton.jit(do_not_specialize=["repeat"])
def peak_of_block(logits, stride, size, repeat, temperatures, peaks, N: tl.constexpr):
    """Find the largest logit of a row and block, unless the row is greedy, which has no limits."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(temperatures + row // repeat) <= 0:
        return
    x = read_logits(logits, row, stride, block * N + tl.arange(0, N), size)
    tl.store(peaks + row * blocks + block, tl.max(x, axis=0))


@triton.jit
def top_of_row(peaks, row, blocks, temperature, P: tl.constexpr):
    """Return a row's largest logit divided by its temperature."""
    parts = tl.arange(0, P)
    return divided(
        tl.max(tl.load(peaks + row * blocks + parts, mask=parts < blocks, other=MINUS_INFINITY), 0), temperature
    )


@triton.jit
def floor_of_row(floors, min_p, top, temperature, row, FLOORED: tl.constexpr):
    """Return what an earlier limit keeps: with FLOORED that in `floors`, else min-p's."""
    if FLOORED:
        return tl.load(floors + row)
    return tl.where((min_p > 0) & (temperature > 0), top + exact_log(tl.where(min_p > 0, min_p, 1.0)), MINUS_INFINITY)


@triton.jit
def is_requested(limit, temperature, WEIGHTED: tl.constexpr):
    if WEIGHTED:
        return (limit < 1) & (temperature > 0)
    return (limit > 0) & (temperature > 0)


@triton.jit
def descend(states, sums, row, rows, blocks, level, limit, P: tl.constexpr, WEIGHTED: tl.constexpr):
    """Find the digits before `level`, which is at least 1: the last of them is the lowest with any mass and with less
    than the limit above it. Returns the digits, the mass above them, and the limit.

    states [levels, R, 3] and sums [levels, R, blocks, 16] as in `count_digits`. `limit` is the row's top-k, or WEIGHTED
    its top-p: a share of the mass of all values, which are those of the first level.
    """
    old, parts, digits = states + ((level - 1) * rows + row) * 3, tl.arange(0, P), tl.arange(0, DIGITS)
    index = (((level - 1) * rows + row) * blocks + parts[:, None]) * DIGITS + digits[None, :]
    digit_sums = tl.sum(tl.load(sums + index, mask=parts[:, None] < blocks, other=0), axis=0)
    above = tl.load(old + 1, mask=level > 1, other=0)
    if WEIGHTED:
        first = share_of(tl.sum(digit_sums, axis=0), limit)
    else:
        first = limit.to(tl.int64)
    limit = tl.where(level > 1, tl.load(old + 2, mask=level > 1, other=0), first)
    higher = above + tl.sum(tl.where(digits[:, None] > digits[None, :], digit_sums[:, None], 0), axis=0)
    digit = tl.min(tl.where((digit_sums > 0) & (higher < limit), digits, DIGITS - 1), axis=0)
    prefix = tl.load(old, mask=level > 1, other=0).to(tl.uint32)
    return (prefix << 4) | digit.to(tl.uint32), tl.sum(tl.where(digits == digit, higher, 0), axis=0), limit


@triton.jit(do_not_specialize=["repeat", "level"])
def count_digits(
    logits, stride, size, repeat, temperatures, min_ps, peaks, floors, limits, states, sums, level,
    N: tl.constexpr, P: tl.constexpr, WEIGHTED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """One level: count, or weigh, a row's logits by their next digit, among those with the digits so far.

    states [levels, R, 3]: these digits, the sum above them, the limit; of the first level unused.
    sums [levels, R, blocks, 16]. int64 both.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, blocks, owner = tl.num_programs(0), tl.num_programs(1), row // repeat
    temperature, limit, level = tl.load(temperatures + owner), tl.load(limits + owner), level.to(tl.int64)
    if is_requested(limit, temperature, WEIGHTED) == 0:
        return
    prefix = tl.full((), 0, tl.uint32)
    if level > 0:
        prefix, above, bound = descend(states, sums, row, rows, blocks, level, limit, P, WEIGHTED)
        if block == 0:
            state = states + (level * rows + row) * 3
            tl.store(state, prefix.to(tl.int64))
            tl.store(state + 1, above)
            tl.store(state + 2, bound)
    columns = block * N + tl.arange(0, N)
    x = read_logits(logits, row, stride, columns, size)
    code, scaled, top = in_order(x), divided(x, temperature), top_of_row(peaks, row, blocks, temperature, P)
    shift = (28 - 4 * level).to(tl.uint32)
    counted = (columns < size) & (
        scaled >= floor_of_row(floors, tl.load(min_ps + owner), top, temperature, row, FLOORED)
    )
    if level > 0:
        counted = counted & ((code >> (shift + 4)) == prefix)
    if WEIGHTED:
        weight = tl.where(counted, exp_weights(scaled - top), 0)
    else:
        weight = counted.to(tl.int64)
    digit = ((code >> shift) & 15).to(tl.int32)
    out = sums + ((level * rows + row) * blocks + block) * DIGITS
    for value in range(DIGITS):
        tl.store(out + value, tl.sum(tl.where(digit == value, weight, 0), axis=0))


@triton.jit(do_not_specialize=["repeat"])
def read_threshold(
    repeat, temperatures, min_ps, peaks, floors, limits, states, sums, out, blocks,
    LEVELS: tl.constexpr, P: tl.constexpr, WEIGHTED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """After the last of LEVELS levels (0: no limit): write a row's threshold, at least what was kept before."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    owner = row // repeat
    temperature = tl.load(temperatures + owner)
    top = top_of_row(peaks, row, blocks, temperature, P)
    threshold = floor_of_row(floors, tl.load(min_ps + owner), top, temperature, row, FLOORED)
    if LEVELS > 0:
        limit = tl.load(limits + owner)
        if is_requested(limit, temperature, WEIGHTED):
            code, _, _ = descend(states, sums, row, rows, blocks, LEVELS, limit, P, WEIGHTED)
            code = code << (32 - 4 * LEVELS)
            # The bits below are 0 in every value; a negative value's are inverted.
            code = tl.where(code >> 31 == 0, code | ((1 << (32 - 4 * LEVELS)) - 1), code)
            threshold = tl.maximum(threshold, divided(from_order(code), temperature))
    tl.store(out + row, threshold)


def best(
    logits: Tensor,
    parameters: ChoiceParameters | None,
    positions: Tensor,
    token_ids: Tensor | None,
    count: int,
    *,
    mass: bool = False,
    as_columns: bool = False,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the `count` largest keys of each row of logits `[R, V]` and their tokens, `[R, count]` each.

    Ties go to the lowest column. With `mass` the log-probabilities of the tokens in place of keys, and the log-sum-exp
    of all keys, `[R]`. `as_columns`: columns in place of tokens. Arguments as for kernels.choose.choose.
    """
    thresholds = None
    if parameters is not None and parameters.restricts:
        thresholds = find_thresholds(logits, parameters, block)
    options = {"mass": mass, "noise": True, "block": block, "as_columns": as_columns}
    return best_columns(logits, parameters, positions, token_ids, count, thresholds, **options)


def logprobs(logits: Tensor, tokens: Tensor, top: int, block: int = BLOCK) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As kernels.choose.logprobs."""
    assert top <= RANKED[-1]
    count = min(next(most for most in RANKED if most >= top), logits.shape[1])
    log_probs, best_tokens, log_mass = best_columns(
        logits, None, None, None, count, None, mass=True, noise=False, block=block
    )
    assert log_mass is not None
    token_logprobs = logits.gather(1, tokens[:, None])[:, 0].float() - log_mass
    rows, size = logits.shape
    above = torch.empty(rows, triton.cdiv(size, block), dtype=torch.int32, device=logits.device)
    count_above[above.shape](logits, logits.stride(0), size, log_mass, token_logprobs, above, N=block, num_warps=8)
    return token_logprobs, above.sum(1) + 1, best_tokens[:, :top], log_probs[:, :top]


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
    as_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `best`, with precomputed thresholds `[R]` or None; without `noise` it ranks logits divided by temperature.

    `as_columns`: columns in place of tokens.
    """
    rows, size = logits.shape
    assert token_ids is None or token_ids.is_contiguous()
    ids = 0 if token_ids is None else token_ids.ndim
    assert count <= size, "there are no more columns"
    assert logits.stride(1) == 1, "columns beside each other"
    blocks, device = triton.cdiv(size, block), logits.device
    block_keys = torch.empty(rows, blocks, count, device=device)
    columns = torch.empty(rows, blocks, count, dtype=torch.int32, device=device)
    peaks, masses = empties(2, (rows, blocks), torch.float32, device) if mass else (block_keys, block_keys)
    p = parameters
    best_of_block[rows, blocks](
        logits, logits.stride(0), size, 1 if p is None else p.repeat,
        block_keys if p is None else p.temperature, block_keys if thresholds is None else thresholds,
        columns if p is None else p.seed_low, columns if p is None else p.seed_high,
        columns if positions is None else positions, columns if token_ids is None else token_ids,
        block_keys, columns, peaks, masses,
        M=count, N=block, SAMPLED=p is not None, RESTRICTED=thresholds is not None, NOISE=noise,
        IDS=ids, MASS=mass, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    keys = torch.empty(rows, count, device=device)
    tokens = torch.empty(rows, count, dtype=torch.int64, device=device)
    log_mass = torch.empty(rows, device=device) if mass else None
    best_of_row[rows,](
        block_keys, columns, peaks, masses, columns if token_ids is None else token_ids, keys, tokens,
        keys if log_mass is None else log_mass, blocks, blocks * count, size,
        M=count, C=triton.next_power_of_2(blocks * count), P=triton.next_power_of_2(blocks),
        IDS=0 if as_columns else ids, MASS=mass, num_warps=8,
    )  # fmt: skip
    return keys, tokens, log_mass


def find_thresholds(logits: Tensor, parameters: ChoiceParameters, block: int = BLOCK) -> Tensor:
    """Return the least logit divided by temperature that min-p, then top-k, then top-p keep, `[R]`.

    Limits that `parameters.limits` excludes cost nothing.
    """
    rows, size = logits.shape
    p, device = parameters, logits.device
    peaks = torch.empty(rows, triton.cdiv(size, block), device=device)
    peak_of_block[peaks.shape](logits, logits.stride(0), size, p.repeat, p.temperature, peaks, N=block, num_warps=8)
    thresholds = None
    if p.limits.top_k:
        thresholds = threshold(logits, p, peaks, thresholds, p.top_k, block)
    if p.limits.top_p:
        thresholds = threshold(logits, p, peaks, thresholds, p.top_p, block)
    return threshold(logits, p, peaks, None, None, block) if thresholds is None else thresholds


def threshold(
    logits: Tensor, p: ChoiceParameters, peaks: Tensor, floors: Tensor | None, limit: Tensor | None, block: int
) -> Tensor:
    """Return the lowest logit divided by temperature that is kept, `[R]`: one of at least `floors`, by default min-p's.

    `limit` is top_k or top_p, or None for min-p alone. peaks `[R, blocks]`: the largest logit of each block.
    """
    rows, size = logits.shape
    (_, blocks), device, levels = peaks.shape, logits.device, 0 if limit is None else LEVELS[logits.dtype]
    sums = torch.empty(levels, rows, blocks, 16, dtype=torch.int64, device=device)
    states = torch.empty(levels, rows, 3, dtype=torch.int64, device=device)
    out, limit = torch.empty(rows, device=device), p.top_k if limit is None else limit
    inputs = p.temperature, p.min_p, peaks, out if floors is None else floors, limit, states, sums
    common = {"P": triton.next_power_of_2(blocks), "WEIGHTED": limit is p.top_p, "FLOORED": floors is not None}
    for level in range(levels):
        count_digits[rows, blocks](
            logits, logits.stride(0), size, p.repeat, *inputs, level, N=block, **common,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    read_threshold[rows,](p.repeat, *inputs, out, blocks, LEVELS=levels, **common, enable_fp_fusion=False)
    return out
