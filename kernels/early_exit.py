"""Early exit of chains: which tokens of a level are kept, and which chains go on after it.

Its terms are those of infer/speculation/proposers/draft_loops/early_exit.py. It decides what is drafted, never what is
accepted, so its sums need no fixed order. On tensors nothing waits for the host: one launch on a GPU
(kernels/triton/early_exit.py), where torch needs twenty. Where the host has each token anyway the same rule is applied
to lists of numbers, chain by chain: operations on small tensors would take longer than a level.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from kernels.dispatch import uses_triton
from kernels.operands import SHARED, Drafting, Values

# the operations of torch that the rule uses, on numbers
NUMBERS = SimpleNamespace(exp=math.exp, log=math.log, clip=lambda value, low, high: min(max(value, low), high))


def expect(ops: Any, chance: Any, log_prob: Any, slope: Any, offset: Any, least: float) -> Any:
    """Return the probability that all tokens down to this level's are accepted, from that of those before it."""
    confidence = ops.clip(ops.exp(log_prob), least, 1 - least)
    return chance / (1 + ops.exp(-(offset + slope * ops.log(confidence / (1 - confidence)))))


def exit_level(
    chains: Drafting, terms: Values, depths: Values, log_probs: Values, level: int, least: float
) -> Drafting:
    """Return the chains after a level whose tokens have these log-probabilities.

    terms `[B, SHARED + 2 D]`: of each chain, slope, the prices of a row, of a step and of a level, then an offset and
    what follows, per depth. Infinite ones stand for a chain that is not scored. depths: no chain is longer. A chain's
    first token is always kept. Probabilities of a token are taken to be at least `least` away from 0 and 1.
    """
    if isinstance(terms, list):
        return exit_level_on_host(chains, terms, depths, log_probs, level, least)
    if uses_triton(terms.device):
        from kernels.triton import early_exit as gpu

        return gpu.exit_level(chains, terms, depths, log_probs, level, least)
    active, length, chance = chains
    slope, row, step, level_price = terms[:, :SHARED].T
    offsets, following = terms[:, SHARED:].chunk(2, dim=1)
    chance = expect(torch, chance, log_probs, slope, offsets[:, level], least)
    keep = active if level == 0 else active & (chance >= row)
    gain = torch.where(keep, chance * following[:, level] - row - step, 0.0).clamp(min=0.0)
    goes_on = (gain > 0) & (gain.sum() >= level_price) & (depths > level + 1)
    return Drafting(goes_on, length + keep, chance)


def exit_level_on_host(
    chains: Drafting, terms: list[list[float]], depths: list[int], log_probs: list[float], level: int, least: float
) -> Drafting:
    length, chance, gains = [*chains.length], [*chains.chance], [0.0] * len(depths)
    for chain, (slope, row, step, _, *rest) in enumerate(terms):
        if chains.active[chain]:
            chance[chain] = expect(NUMBERS, chance[chain], log_probs[chain], slope, rest[level], least)
            if level == 0 or chance[chain] >= row:
                length[chain] += 1
                gains[chain] = max(chance[chain] * rest[len(rest) // 2 + level] - row - step, 0.0)
    surplus = sum(gains)
    goes_on = [
        gain > 0 and surplus >= prices[SHARED - 1] and depth > level + 1
        for gain, prices, depth in zip(gains, terms, depths, strict=True)
    ]
    return Drafting(goes_on, length, chance)
