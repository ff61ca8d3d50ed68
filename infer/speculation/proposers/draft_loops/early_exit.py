"""Early exit of chains: which of them a draft loop continues after a level, from the drafter's log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infer.request import Request
from infer.speculation.control.confidence import FREE, MIN_CHANCE, Confidence
from kernels.early_exit import exit_level
from kernels.operands import SHARED, Drafting

LIKELY = 1e30  # stands for a probability in the terms: a next token is worth any price, if the one before it is kept


def num_terms(deepest: int) -> int:
    """Return the number of terms of a chain of at most `deepest` tokens."""
    return SHARED + 2 * deepest


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
            terms[2:SHARED] = FREE.step, FREE.level
            terms[SHARED + deepest :] = [LIKELY] * deepest
        rows.append(terms or unscored)
    return rows


class EarlyExit:
    """Ends each of B chains where a further token is not worth its price (kernels/early_exit.py).

    terms `[B, T]` and depths `[B]`: tensors where the draft runs, which then never waits for the host, or lists, by
    which the host decides after each level and ends a draft that no chain continues.
    """

    def __init__(self, terms: Any, depths: Any) -> None:
        self._terms, self._depths, self.chains = terms, depths, Drafting.begin(depths)
        self._on_host = isinstance(terms, list)

    def after(self, level: int, log_probs: Any) -> bool:
        """Take a level's log-probabilities `[B]`; return whether the draft goes on."""
        if self._on_host and isinstance(log_probs, Tensor):
            log_probs = log_probs.tolist()
        self.chains = exit_level(self.chains, self._terms, self._depths, log_probs, level, MIN_CHANCE)
        return not self._on_host or any(self.chains.active)

    def after_all(self, log_probs: Tensor) -> None:
        """Take those of all levels `[B, D]`, which are drafted in any case."""
        levels = log_probs.T.tolist() if self._on_host else log_probs.unbind(1)
        for level, values in enumerate(levels):
            if not self.after(level, values):
                break

    @property
    def lengths(self) -> Tensor:
        """Lengths of the chains `[B]`, once all levels were taken."""
        return torch.tensor(self.chains.length) if self._on_host else self.chains.length
