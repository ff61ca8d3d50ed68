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
from kernels.early_exit import FIELDS, Drafting, exit_level

LIKELY = 1e30  # stands for a probability in the terms: a next token is worth any price, if the one before it is kept


def num_terms(deepest: int) -> int:
    """Return the number of terms of a chain of at most `deepest` tokens."""
    return FIELDS + 2 * deepest


def exit_rows(
    confidence: Confidence | None,
    requests: Sequence[Request | None],
    depths: Sequence[int],
    deepest: int,
    *,
    parallel: bool = False,
) -> list[list[float]]:
    """Return the terms of the chains of these requests, `num_terms(deepest)` each.

    `parallel`: all levels of the head are drafted in any case. A chain then ends where the next row does not pay, and
    not where past rates leave little hope for a level that the head may be sure of.
    """
    unscored = [0.0, *FREE, *[math.inf] * (2 * deepest)]  # every token is certain, and worth any price
    rows = list[list[float]]()
    for request, depth in zip(requests, depths, strict=True):
        terms = None if confidence is None or request is None else confidence.terms(request, depth, deepest)
        if terms is not None and parallel:
            terms[2:FIELDS] = FREE.step, FREE.level
            terms[FIELDS + deepest :] = [LIKELY] * deepest
        rows.append(terms or unscored)
    return rows


def exit_terms(
    confidence: Confidence | None,
    requests: Sequence[Request | None],
    depths: Sequence[int],
    deepest: int,
    *,
    parallel: bool = False,
) -> Tensor:
    """Return `exit_rows` as a tensor `[B, num_terms(deepest)]`, on the host."""
    return torch.tensor(exit_rows(confidence, requests, depths, deepest, parallel=parallel))


class EarlyExit:
    """Decides by `exit_terms` `[B, T]`, on their device.

    `on_host`: the host may wait for decisions, to end a draft that no chain continues.
    """

    def __init__(self, terms: Tensor, *, on_host: bool = False) -> None:
        self._terms, self.on_host = terms, on_host

    def __call__(self, level: int, log_probs: Tensor, chains: Drafting, depths: Tensor) -> Drafting:
        """Return the chains after a level; see `kernels.early_exit.exit_level`."""
        return exit_level(chains, self._terms, depths, log_probs, level, MIN_CHANCE)


class HostExit:
    """Decides as EarlyExit does, by `exit_rows`, without the bound on a chain's depth."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self._rows, self._chances = rows, [1.0] * len(rows)

    def decide(self, level: int, log_probs: Sequence[float], active: Sequence[int]) -> tuple[list[bool], list[bool]]:
        """Return which tokens of this level the chains `active` keep, and which of them go on after it.

        log_probs: of the tokens, under the noise that they were chosen with.
        """
        kept, gains = list[bool](), list[float]()
        for index, value in zip(active, log_probs, strict=True):
            (slope, row, step, _), depths = self._rows[index][:FIELDS], self._rows[index][FIELDS:]
            self._chances[index] *= sigmoid(depths[level] + slope * logit(math.exp(value)))
            kept.append(level == 0 or self._chances[index] >= row)
            gain = self._chances[index] * depths[len(depths) // 2 + level] - row - step
            gains.append(max(gain, 0.0) if kept[-1] else 0.0)
        surplus = sum(gains)
        return kept, [gain > 0 and surplus >= self._rows[index][3] for index, gain in zip(active, gains, strict=True)]

    def lengths(self, log_probs: Sequence[Sequence[float]], depths: Sequence[int]) -> list[int]:
        """Return the lengths of chains of at most `depths` tokens, all of which are drafted already."""
        lengths, active = [0] * len(depths), [row for row, depth in enumerate(depths) if depth]
        for level in range(max(depths, default=0)):
            kept, going = self.decide(level, [log_probs[row][level] for row in active], active)
            for row, keep in zip(active, kept, strict=True):
                lengths[row] += keep
            active = [row for row, goes_on in zip(active, going, strict=True) if goes_on and depths[row] > level + 1]
        return lengths
