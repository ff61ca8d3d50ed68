"""Early exit of chains without the host: which tokens of a level are kept, and which chains go on after it.

Its terms are those of infer/speculation/early_exit.py. It decides what is drafted, never what is
accepted, so its sums need no fixed order. One launch on a GPU (kernels/triton/early_exit.py), where torch needs twenty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.triton import in_use

FIELDS = 4  # columns of a row of terms: slope and prices; then two per depth


class Drafting(NamedTuple):
    """B chains that are being drafted."""

    active: Tensor  # bool [B], which have reached the level
    length: Tensor  # int64 [B]
    chance: Tensor  # fp32 [B], the probability that all tokens before the level are accepted

    @classmethod
    def begin(cls, depths: Tensor) -> Drafting:
        return cls(depths > 0, torch.zeros_like(depths), torch.ones_like(depths, dtype=torch.float32))


def exit_level(
    chains: Drafting, terms: Tensor, depths: Tensor, log_probs: Tensor, level: int, least: float
) -> Drafting:
    """Return the chains after a level whose tokens have these log-probabilities `[B]`.

    terms `[B, FIELDS + 2 D]`: of each chain, slope, the prices of a row, of a step and of a level, then an offset and
    what follows, per depth. Infinite ones stand for a chain that is not scored. depths `[B]`: no chain is longer. A
    chain's first token is always kept. Probabilities of a token are taken to be at least `least` away from 0 and 1.
    """
    if in_use(terms.device):
        from kernels.triton import early_exit as gpu

        return gpu.exit_level(chains, terms, depths, log_probs, level, least)
    active, length, chance = chains
    slope, row, step, level_price = terms[:, :FIELDS].T
    offsets, following = terms[:, FIELDS:].chunk(2, dim=1)
    confidence = log_probs.exp().clamp(least, 1 - least).logit()
    chance = chance * (offsets[:, level] + slope * confidence).sigmoid()
    keep = active if level == 0 else active & (chance >= row)
    gain = torch.where(keep, chance * following[:, level] - row - step, 0.0).clamp(min=0.0)
    goes_on = (gain > 0) & (gain.sum() >= level_price) & (depths > level + 1)
    return Drafting(goes_on, length + keep, chance)
