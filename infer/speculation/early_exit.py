"""Early exit of chains: which of them a draft loop continues after a level, from the drafter's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from infer.request import Request
from infer.speculation.control.confidence import MIN_CHANCE, Confidence, ExitDecision, Prices
from kernels.early_exit import FIELDS, Drafting, exit_level
from kernels.upload import sent


class EarlyExit(Protocol):
    """Decides after each level which chains go on. `on_host`: the host knows what it decided."""

    on_host: bool

    def __call__(self, level: int, log_probs: Tensor, chains: Drafting, depths: Tensor) -> Drafting:
        """Return the chains after a level of tokens with these log-probabilities `[B]`, under the noise that they were
        chosen with. No chain is longer than `depths` `[B]`.
        """
        ...


class HostExit:
    """Lets `confidence` decide, on the host."""

    on_host = True

    def __init__(self, confidence: Confidence, requests: Sequence[Request], depths: Sequence[int]) -> None:
        self._confidence, self._requests = confidence, requests
        confidence.start(requests, depths)

    def decide(self, active: Sequence[int], log_probs: Sequence[float]) -> list[ExitDecision]:
        """Decide on the chains `active`, from the log-probabilities of their tokens of this level."""
        return self._confidence.score([self._requests[index] for index in active], log_probs)

    def __call__(self, level: int, log_probs: Tensor, chains: Drafting, depths: Tensor) -> Drafting:
        index = chains.active.nonzero()[:, 0]
        decisions = self.decide(index.tolist(), log_probs[index].tolist())
        both = torch.zeros(2, len(depths), dtype=torch.bool)
        both[:, index.cpu()] = torch.tensor([(one.keep, one.continue_) for one in decisions]).T
        keep, continue_ = sent(both, depths.device)
        return Drafting(continue_ & (depths > level + 1), chains.length + keep, chains.chance)


FREE = Prices(-1.0, 0.0, -1.0)  # at which every chain is drafted to its full budget


def num_terms(deepest: int) -> int:
    """Return the number of terms of a chain of at most `deepest` tokens."""
    return FIELDS + 2 * deepest


def exit_terms(
    confidence: Confidence | None, requests: Sequence[Request | None], depths: Sequence[int], deepest: int
) -> Tensor:
    """Return the terms of the chains of these requests for TensorExit, `[B, num_terms(deepest)]`, on the host."""
    rows = list[list[float]]()
    for request, depth in zip(requests, depths, strict=True):
        terms = None if confidence is None or request is None else confidence.terms(request, depth)
        if confidence is None or terms is None:
            rows.append([0.0] * num_terms(deepest))
            continue
        spare = [0.0] * (deepest - depth)
        prices = FREE if confidence.prices is None else confidence.prices
        rows.append([1.0, terms.slope, *prices, *terms.offsets, *spare, *terms.following, *spare])
    return torch.tensor(rows)


class TensorExit:
    """Decides as `Confidence.score` does, without the host: by its `exit_terms`, which lie on the device."""

    on_host = False

    def __init__(self, terms: Tensor) -> None:
        self._terms = terms

    def __call__(self, level: int, log_probs: Tensor, chains: Drafting, depths: Tensor) -> Drafting:
        return exit_level(chains, self._terms, depths, log_probs, level, MIN_CHANCE)
