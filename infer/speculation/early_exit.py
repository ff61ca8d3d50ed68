"""Early exit of chains: which of them a draft loop continues after a level, from the drafter's log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.request import Request
from infer.speculation.control.confidence import FREE, MIN_CHANCE, Confidence
from kernels.early_exit import FIELDS, Drafting, exit_level

LIKELY = 1e30  # stands for a probability in the terms: a next token is worth any price, if the one before it is kept


def num_terms(deepest: int) -> int:
    """Return the number of terms of a chain of at most `deepest` tokens."""
    return FIELDS + 2 * deepest


def exit_terms(
    confidence: Confidence | None,
    requests: Sequence[Request | None],
    depths: Sequence[int],
    deepest: int,
    *,
    parallel: bool = False,
) -> Tensor:
    """Return the terms of the chains of these requests, `[B, num_terms(deepest)]`, on the host.

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
    return torch.tensor(rows)


class EarlyExit:
    """Ends each of B chains where a further token is not worth its price (kernels/early_exit.py).

    terms `[B, T]` and depths `[B]`: tensors where the draft runs, which then never waits for the host, or numpy arrays,
    by which the host decides after each level and ends a draft that no chain continues.
    """

    def __init__(self, terms: Any, depths: Any) -> None:
        self._terms, self._depths, self.chains = terms, depths, Drafting.begin(depths)
        self._on_host = isinstance(terms, np.ndarray)

    def after(self, level: int, log_probs: Any) -> bool:
        """Take a level's log-probabilities `[B]`; return whether the draft goes on."""
        if self._on_host and isinstance(log_probs, Tensor):
            log_probs = log_probs.cpu().numpy()
        self.chains = exit_level(self.chains, self._terms, self._depths, log_probs, level, MIN_CHANCE)
        return not self._on_host or bool(self.chains.active.any())

    def after_all(self, log_probs: Tensor) -> None:
        """Take those of all levels `[B, D]`, which are drafted in any case."""
        levels = log_probs.cpu().numpy() if self._on_host else log_probs
        for level in range(log_probs.shape[1]):
            if not self.after(level, levels[:, level]):
                break

    @classmethod
    def on_host(cls, terms: Tensor, depths: Sequence[int]) -> EarlyExit:
        return cls(terms.numpy(), np.array(depths))

    @property
    def lengths(self) -> Tensor:
        """Lengths of the chains `[B]`, once all levels were taken."""
        return torch.as_tensor(self.chains.length)
