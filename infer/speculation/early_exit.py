"""Early exit of chains: which of them a draft loop continues after a level, from the drafter's log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.request import Request
from infer.speculation.control.confidence import FREE, MIN_CHANCE, Confidence

FIELDS = 4  # columns of a row of terms: slope and prices; then two per depth


def num_terms(deepest: int) -> int:
    """Return the number of terms of a chain of at most `deepest` tokens."""
    return FIELDS + 2 * deepest


def exit_terms(
    confidence: Confidence | None, requests: Sequence[Request | None], depths: Sequence[int], deepest: int
) -> Tensor:
    """Return the terms of the chains of these requests for EarlyExit, `[B, num_terms(deepest)]`, on the host."""
    unscored = [0.0, *FREE, *[math.inf] * (2 * deepest)]  # every token is certain, and worth any price
    rows = list[list[float]]()
    for request, depth in zip(requests, depths, strict=True):
        terms = None if confidence is None or request is None else confidence.terms(request, depth, deepest)
        rows.append(terms or unscored)
    return torch.tensor(rows)


class EarlyExit:
    """Decides after each level of a draft which chains go on, by their `exit_terms`, which lie on its device.

    `on_host`: the host may wait for decisions, to end a draft that no chain continues.
    """

    def __init__(self, terms: Tensor, *, on_host: bool = False) -> None:
        self.on_host = on_host
        self._slope, self._row, step, self._level = terms[:, :FIELDS].T
        self._deeper = self._row + step  # price of one more token
        self._offsets, self._following = terms[:, FIELDS:].chunk(2, dim=1)
        self._chance = torch.ones_like(self._slope)

    def __call__(self, level: int, log_probs: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return, bool `[B]` each, which tokens of this level to keep, and which chains to continue after it.

        log_probs `[B]`: of the drafted tokens, under the noise that they were chosen with; active `[B]`: which chains
        have reached the level. Decisions on other chains are ignored. A chain's first token is always kept.
        """
        confidence = log_probs.exp().clamp(MIN_CHANCE, 1 - MIN_CHANCE).logit()
        self._chance = self._chance * (self._offsets[:, level] + self._slope * confidence).sigmoid()
        keep = self._chance >= self._row if level else torch.ones_like(active)
        gain = torch.where(active & keep, self._chance * self._following[:, level] - self._deeper, 0.0)
        return keep, (gain > 0) & (gain.clamp(min=0.0).sum() >= self._level)
