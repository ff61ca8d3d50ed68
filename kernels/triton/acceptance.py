# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Block verification and the entropies of typical acceptance in Triton; distributions are read in blocks of columns.

    verify_block    (request): the weights along its chain, the residual of the target's distribution at each node, the
                    coins, and a sample from the residual after the last accepted token
    entropy_of_row  (row of `probs`)

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

from kernels.copies import upload_lists
from kernels.noise import COINS, LEAST, MASK32, stream
from kernels.triton.noise import exact_log, gumbel_noise, mix32, row_key

BLOCK = 2048
SMALLEST = tl.constexpr(LEAST)


@triton.jit
def read_left(probs, row, draft_probs, draft_row, draft_token, weight, subtracts, columns, V):
    """Return max(weight * target - draft, 0) [N] in fp64; without `draft_row` the draft is one-hot at `draft_token`."""
    inside = columns < V
    residual = tl.load(probs + row * V + columns, mask=inside, other=0.0).to(tl.float64) * weight
    has_draft = inside & (draft_row >= 0) & subtracts
    draft = tl.load(draft_probs + draft_row * V + columns, mask=has_draft, other=0.0).to(tl.float64)
    draft = tl.where((draft_row < 0) & subtracts & (columns == draft_token), 1.0, draft)
    return tl.maximum(residual - draft, 0.0)


@triton.jit
def best_draw(probs, row, draft_probs, draft_row, draft_token, weight, subtracts, key, V, BLOCK: tl.constexpr):
    """Return the largest log(weight) + noise and its column, ties to the lowest; -inf if every weight is zero."""
    best, token = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        residual = read_left(probs, row, draft_probs, draft_row, draft_token, weight, subtracts, columns, V).to(
            tl.float32
        )
        scores = exact_log(tl.maximum(residual, SMALLEST)) + gumbel_noise(key, columns.to(tl.int64))
        scores = tl.where(residual >= SMALLEST, scores, float("-inf"))
        highest = tl.max(scores, 0)
        column = tl.min(tl.where(scores == highest, columns, V), 0)
        token = tl.where(highest > best, column, token)
        best = tl.maximum(best, highest)
    return best, token


@triton.jit(do_not_specialize=["width"])
def verify_block(
    probs, rows, tokens, counts, draft_probs, draft_rows, seeds, roots, out, V, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """seeds `[B, 3]`: low half, high half, and the high half for coins."""
    request = tl.program_id(0).to(tl.int64)
    row, count, draft_row = tl.load(rows + request), tl.load(counts + request), tl.load(draft_rows + request)
    low, coin_key = tl.load(seeds + request * 3), tl.load(seeds + request * 3 + 2)
    coin_key = mix32(mix32(low.to(tl.uint32)) ^ coin_key.to(tl.uint32))
    one = tl.full((), 1.0, tl.float64)
    weight, kept, accepted, position = one, one, tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for index in range(count):
        position += 1  # in the interpreter the index is not a tensor
        token = tl.load(tokens + request * width + index)
        p = tl.load(probs + (row + index) * V + token).to(tl.float64)
        q = tl.load(draft_probs + (draft_row + index) * V + token, mask=draft_row >= 0, other=1.0).to(tl.float64)
        weight = tl.minimum(weight * (p / q), one)
        chance = weight
        if index + 1 < count:
            next_token = tl.load(tokens + request * width + index + 1)
            next_row = tl.where(draft_row >= 0, draft_row + index + 1, -1)
            total = tl.zeros([BLOCK], tl.float64)
            for start in range(0, V, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                total += read_left(probs, row + index + 1, draft_probs, next_row, next_token, weight, True, columns, V)
            residual_mass = tl.sum(total, 0)
            gap = residual_mass + 1.0 - weight
            chance = tl.where(gap > 0, residual_mass / tl.where(gap > 0, gap, one), one)
        word = mix32(coin_key ^ position.to(tl.uint32))
        taken = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10 <= chance
        kept, accepted = tl.where(taken, weight, kept), tl.where(taken, position, accepted)
    key = row_key(low, tl.load(seeds + request * 3 + 1), tl.load(roots + request) + accepted)
    cut = accepted < count
    draft_token = tl.load(tokens + request * width + accepted, mask=cut, other=0)
    next_row = tl.where(draft_row >= 0, draft_row + accepted, -1)
    weight = tl.where(cut, kept, one)
    best, token = best_draw(probs, row + accepted, draft_probs, next_row, draft_token, weight, cut, key, V, BLOCK)
    if best == float("-inf"):  # the distributions agree bit for bit
        best, token = best_draw(
            probs, row + accepted, draft_probs, next_row, draft_token, one, accepted < 0, key, V, BLOCK
        )
    tl.store(out + request * 2, accepted)
    tl.store(out + request * 2 + 1, token.to(tl.int64))


@triton.jit
def entropy_of_row(probs, out, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        p = tl.load(probs + row * V + columns, mask=columns < V, other=0.0)
        total += p.to(tl.float64) * exact_log(tl.maximum(p, SMALLEST)).to(tl.float64)
    tl.store(out + row, -tl.sum(total, 0))


def block(
    probs: Tensor,
    tokens: Sequence[Sequence[int]],
    draft_probs: Sequence[Tensor | None],
    seeds: Sequence[int],
    roots: Sequence[int],
    block: int = BLOCK,
) -> list[tuple[int, int]]:
    """As kernels.acceptance.block."""
    probs, device, counts = probs.contiguous(), probs.device, [len(item) for item in tokens]
    sampled = [item[:count] for item, count in zip(draft_probs, counts, strict=True) if item is not None]
    stacked = torch.cat([item.to(device, torch.float32) for item in sampled]) if sampled else probs
    first = list(itertools.accumulate([count + 1 for count in counts[:-1]], initial=0))
    kept = [0 if item is None else count for item, count in zip(draft_probs, counts, strict=True)]
    before = itertools.accumulate(kept, initial=0)
    draft_rows = [-1 if item is None else row for item, row in zip(draft_probs, before, strict=False)]
    width = max(1, *counts)
    padded = [token for item in tokens for token in (*item, *[0] * (width - len(item)))]
    halves = [
        half
        for seed, root in zip(seeds, roots, strict=True)
        for half in (seed & MASK32, seed >> 32, (seed >> 32) ^ stream(COINS, root))
    ]
    parts = first, padded, counts, draft_rows, halves, roots
    rows, ids, lengths, draft_starts, keys, positions = upload_lists(parts, device)
    out = torch.empty(len(tokens), 2, dtype=torch.int64, device=device)
    launch(probs, stacked, rows, ids, lengths, draft_starts, keys, positions, out, width, block)
    return [(accepted, token) for accepted, token in out.tolist()]


def launch(
    probs: Tensor,
    draft_probs: Tensor,
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
    """probs `[R, V]`, draft_probs `[D, V]`; the rest per request. `rows`, `places`: first row in each, -1 for none."""
    verify_block[len(counts),](
        probs, rows, ids, counts, draft_probs, places, seeds, roots, out, probs.shape[1], width, BLOCK=block,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip


def entropy(probs: Tensor, block: int = BLOCK) -> Tensor:
    """As kernels.acceptance.entropy_of, probs `[R, V]` fp32 -> fp64 `[R]`."""
    probs = probs.contiguous()
    out = torch.empty(len(probs), dtype=torch.float64, device=probs.device)
    entropy_of_row[len(probs),](probs, out, probs.shape[1], BLOCK=block, num_warps=8, enable_fp_fusion=False)
    return out
