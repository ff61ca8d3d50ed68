"""Early exit of chains: which of them a draft loop continues after a level, from the drafter's log-probabilities.

One rule in two forms: on tensors, which lie where the draft runs and need no host, and on numbers, where the host has
each token anyway and some ten operations on small tensors would take longer than a level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.request import Request
from infer.speculation.control.confidence import FREE, MIN_CHANCE, Confidence, logit, sigmoid

FIELDS = 4  # columns of a row of terms: slope and prices; then two per depth


def num_terms(deepest: int) -> int:
    """Return the number of terms of a chain of at most `deepest` tokens."""
    return FIELDS + 2 * deepest


def exit_rows(
    confidence: Confidence | None, requests: Sequence[Request | None], depths: Sequence[int], deepest: int
) -> list[list[float]]:
    """Return the terms of the chains of these requests, `num_terms(deepest)` each."""
    unscored = [0.0, *FREE, *[math.inf] * (2 * deepest)]  # every token is certain, and worth any price
    rows = list[list[float]]()
    for request, depth in zip(requests, depths, strict=True):
        terms = None if confidence is None or request is None else confidence.terms(request, depth, deepest)
        rows.append(terms or unscored)
    return rows


def exit_terms(
    confidence: Confidence | None, requests: Sequence[Request | None], depths: Sequence[int], deepest: int
) -> Tensor:
    """Return `exit_rows` as a tensor `[B, num_terms(deepest)]`, on the host."""
    return torch.tensor(exit_rows(confidence, requests, depths, deepest))


class EarlyExit:
    """Decides by `exit_terms` `[B, T]`, on their device.

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


class HostExit:
    """Decides as EarlyExit does, by `exit_rows`."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self._rows, self._chances = rows, [1.0] * len(rows)

    def decide(self, level: int, log_probs: Sequence[float], active: Sequence[int]) -> tuple[list[bool], list[bool]]:
        """Return the same of the chains `active`, from the log-probabilities of their tokens."""
        kept, gains = list[bool](), list[float]()
        for index, value in zip(active, log_probs, strict=True):
            (slope, row, step, _), depths = self._rows[index][:FIELDS], self._rows[index][FIELDS:]
            self._chances[index] *= sigmoid(depths[level] + slope * logit(math.exp(value)))
            kept.append(level == 0 or self._chances[index] >= row)
            gain = self._chances[index] * depths[len(depths) // 2 + level] - row - step
            gains.append(max(gain, 0.0) if kept[-1] else 0.0)
        surplus = sum(gains)
        return kept, [gain > 0 and surplus >= self._rows[index][3] for index, gain in zip(active, gains, strict=True)]
