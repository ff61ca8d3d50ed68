"""Early exit of chains: which tokens of a level are kept, and which chains go on after it.

Its terms are those of infer/speculation/early_exit.py. It decides what is drafted, never what is
accepted, so its sums need no fixed order. The rule is written for torch and for numpy: on the host, whose arrays are a
few numbers, an operation of numpy takes a fraction of torch's. One launch on a GPU (kernels/triton/early_exit.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.triton import in_use

FIELDS = 4  # columns of a row of terms: slope and prices; then two per depth
Array = Any  # a tensor, or a numpy array on the host


class Drafting(NamedTuple):
    """B chains that are being drafted."""

    active: Array  # bool [B], which have reached the level
    length: Array  # int64 [B]
    chance: Array  # fp32 [B], the probability that all tokens before the level are accepted

    @classmethod
    def begin(cls, depths: Array) -> Drafting:
        xp: Any = torch if isinstance(depths, Tensor) else np
        return cls(depths > 0, xp.zeros_like(depths), xp.ones_like(depths, dtype=xp.float32))


def exit_level(chains: Drafting, terms: Array, depths: Array, log_probs: Array, level: int, least: float) -> Drafting:
    """Return the chains after a level whose tokens have these log-probabilities `[B]`.

    terms `[B, FIELDS + 2 D]`: of each chain, slope, the prices of a row, of a step and of a level, then an offset and
    what follows, per depth. Infinite ones stand for a chain that is not scored. depths `[B]`: no chain is longer. A
    chain's first token is always kept. Probabilities of a token are taken to be at least `least` away from 0 and 1.
    """
    on_host = not isinstance(terms, Tensor)
    if not on_host and in_use(terms.device):
        from kernels.triton import early_exit as gpu

        return gpu.exit_level(chains, terms, depths, log_probs, level, least)
    xp: Any = np if on_host else torch
    active, length, chance = chains
    slope, row, step, level_price = terms[:, :FIELDS].T
    offset, following = terms[:, FIELDS + level], terms[:, (FIELDS + terms.shape[1]) // 2 + level]
    confidence = xp.exp(log_probs).clip(least, 1 - least)
    chance = chance / (1 + xp.exp(-(offset + slope * xp.log(confidence / (1 - confidence)))))
    keep = active if level == 0 else active & (chance >= row)
    gain = xp.where(keep, chance * following - row - step, 0.0).clip(0.0)
    goes_on = (gain > 0) & (gain.sum() >= level_price) & (depths > level + 1)
    return Drafting(goes_on, length + keep, chance)
