# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Block verification and the entropies of typical acceptance in Triton; distributions are read in blocks of columns.

    verify_block    (request): the weights along its chain, the residual of the target's distribution at each node, the
                    coins, and a sample from the residual after the last accepted token
    entropy_of_row  (row of `laws`)

Arithmetic that decides is fp64, each operation rounded by itself, in the order of kernels/acceptance.py except for
sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.acceptance import COINS, LEAST, stream
from kernels.noise import MASK32
from kernels.triton.noise import exact_log, gumbel_noise, mix32, row_key

BLOCK = 2048
SMALLEST = tl.constexpr(LEAST)


@triton.jit
def read_left(laws, row, drawn, drawn_row, certain, weight, subtracts, columns, V):
    """Return max(weight * target - draft, 0) [N] in fp64; without a `drawn_row` the draft is one-hot at `certain`."""
    inside = columns < V
    left = tl.load(laws + row * V + columns, mask=inside, other=0.0).to(tl.float64) * weight
    known = inside & (drawn_row >= 0) & subtracts
    draft = tl.load(drawn + drawn_row * V + columns, mask=known, other=0.0).to(tl.float64)
    draft = tl.where((drawn_row < 0) & subtracts & (columns == certain), 1.0, draft)
    return tl.maximum(left - draft, 0.0)


@triton.jit
def best_draw(laws, row, drawn, drawn_row, certain, weight, subtracts, key, V, BLOCK: tl.constexpr):
    """Return the largest log(weight) + noise and its column, ties to the lowest; -inf if every weight is zero."""
    best, token = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        left = read_left(laws, row, drawn, drawn_row, certain, weight, subtracts, columns, V).to(tl.float32)
        scores = exact_log(tl.maximum(left, SMALLEST)) + gumbel_noise(key, columns.to(tl.int64))
        scores = tl.where(left >= SMALLEST, scores, float("-inf"))
        highest = tl.max(scores, 0)
        place = tl.min(tl.where(scores == highest, columns, V), 0)
        token = tl.where(highest > best, place, token)
        best = tl.maximum(best, highest)
    return best, token


@triton.jit
def verify_block(
    laws, rows, tokens, counts, drawn, drawn_rows, seeds, roots, out, V, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """seeds `[B, 3]`: low half, high half, and the high half for coins."""
    request = tl.program_id(0).to(tl.int64)
    row, count, drawn_row = tl.load(rows + request), tl.load(counts + request), tl.load(drawn_rows + request)
    low, coin_key = tl.load(seeds + request * 3), tl.load(seeds + request * 3 + 2)
    coin_key = mix32(mix32(low.to(tl.uint32)) ^ coin_key.to(tl.uint32))
    one = tl.full((), 1.0, tl.float64)
    weight, kept, accepted, place = one, one, tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for index in range(count):
        place += 1  # in the interpreter the index is not a tensor
        token = tl.load(tokens + request * width + index)
        p = tl.load(laws + (row + index) * V + token).to(tl.float64)
        q = tl.load(drawn + (drawn_row + index) * V + token, mask=drawn_row >= 0, other=1.0).to(tl.float64)
        weight = tl.minimum(weight * (p / q), one)
        chance = weight
        if index + 1 < count:
            following = tl.load(tokens + request * width + index + 1)
            here = tl.where(drawn_row >= 0, drawn_row + index + 1, -1)
            total = tl.zeros([BLOCK], tl.float64)
            for start in range(0, V, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                total += read_left(laws, row + index + 1, drawn, here, following, weight, True, columns, V)
            left = tl.sum(total, 0)
            gap = left + 1.0 - weight
            chance = tl.where(gap > 0, left / tl.where(gap > 0, gap, one), one)
        word = mix32(coin_key ^ place.to(tl.uint32))
        taken = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10 <= chance
        kept, accepted = tl.where(taken, weight, kept), tl.where(taken, place, accepted)
    key = row_key(low, tl.load(seeds + request * 3 + 1), tl.load(roots + request) + accepted)
    cut = accepted < count
    certain = tl.load(tokens + request * width + accepted, mask=cut, other=0)
    here = tl.where(drawn_row >= 0, drawn_row + accepted, -1)
    weight = tl.where(cut, kept, one)
    best, token = best_draw(laws, row + accepted, drawn, here, certain, weight, cut, key, V, BLOCK)
    if best == float("-inf"):  # the distributions agree bit for bit
        best, token = best_draw(laws, row + accepted, drawn, here, certain, one, accepted < 0, key, V, BLOCK)
    tl.store(out + request * 2, accepted)
    tl.store(out + request * 2 + 1, token.to(tl.int64))


@triton.jit
def entropy_of_row(laws, out, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        p = tl.load(laws + row * V + columns, mask=columns < V, other=0.0)
        total += p.to(tl.float64) * exact_log(tl.maximum(p, SMALLEST)).to(tl.float64)
    tl.store(out + row, -tl.sum(total, 0))


def block(
    laws: Tensor,
    tokens: Sequence[Sequence[int]],
    drawn: Sequence[Tensor | None],
    seeds: Sequence[int],
    roots: Sequence[int],
    block: int = BLOCK,
) -> list[tuple[int, int]]:
    """As kernels.acceptance.block."""
    laws, device, counts = laws.contiguous(), laws.device, [len(own) for own in tokens]
    known = [own[:count] for own, count in zip(drawn, counts, strict=True) if own is not None]
    stacked = torch.cat([own.to(device, torch.float32) for own in known]) if known else laws
    first = list(itertools.accumulate([count + 1 for count in counts[:-1]], initial=0))
    kept = [0 if own is None else count for own, count in zip(drawn, counts, strict=True)]
    before = itertools.accumulate(kept, initial=0)
    drawn_rows = [-1 if own is None else row for own, row in zip(drawn, before, strict=False)]
    width = max(1, *counts)
    padded = [[*own, *[0] * (width - len(own))] for own in tokens]
    halves = [
        [seed & MASK32, seed >> 32, (seed >> 32) ^ stream(COINS, root)] for seed, root in zip(seeds, roots, strict=True)
    ]
    parts = first, padded, counts, drawn_rows, halves, list(roots)
    rows, ids, lengths, places, keys, positions = (torch.tensor(part, device=device) for part in parts)
    out = torch.empty(len(tokens), 2, dtype=torch.int64, device=device)
    launch(laws, stacked, rows, ids, lengths, places, keys, positions, out, width, block)
    return [(accepted, token) for accepted, token in out.tolist()]


def launch(
    laws: Tensor,
    drawn: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    places: Tensor,
    seeds: Tensor,
    roots: Tensor,
    out: Tensor,
    width: int,
    block: int,
) -> None:
    """laws `[R, V]`, drawn `[D, V]`; the rest per request. `rows`, `places`: its first row in each, -1 for none."""
    verify_block[len(counts),](
        laws, rows, ids, counts, drawn, places, seeds, roots, out, laws.shape[1], width, BLOCK=block, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip


def entropy(laws: Tensor, block: int = BLOCK) -> Tensor:
    """As kernels.acceptance.entropy_of, laws `[R, V]` fp32 -> fp64 `[R]`."""
    laws = laws.contiguous()
    out = torch.empty(len(laws), dtype=torch.float64, device=laws.device)
    entropy_of_row[len(laws),](laws, out, laws.shape[1], BLOCK=block, num_warps=8, enable_fp_fusion=False)
    return out
