"""What is learnt of one request's drafts; the request's drafter holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Drafts that a prior counts like; with a quarter, chance alone ends drafting: two misses in a row.
PRIOR_WEIGHT = 16.0


class Evidence(NamedTuple):
    """What evidence is kept apart by."""

    drafter: str
    sampled: bool
    chain: bool  # by depth, else by rank


@dataclass
class Rates:
    """By depth of a chain or rank of a tree from 0, decayed counts of drafts that tried it, and that were right there.

    Evidence on depths and ranks that a draft left out decays too.
    """

    decay: float
    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def record(self, tried: int, path: Sequence[int]) -> None:
        """Record a draft whose first `tried` nodes are evidence; those in `path`, counted from 1, were accepted."""
        missing = [0.0] * (tried - len(self.tried))
        self.tried = [self.decay * count + (place < tried) for place, count in enumerate(self.tried + missing)]
        self.right = [self.decay * count for count in self.right + missing]
        for node in path:
            self.right[node - 1] += 1.0

    def rate(self, place: int, prior: float) -> float:
        tried, right = (self.tried[place], self.right[place]) if place < len(self.tried) else (0.0, 0.0)
        return (right + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)


class Score(NamedTuple):
    """The probabilities of one drafted token."""

    features: tuple[float, float, float]  # logit h, logit c, 1 (confidence.py)
    right: float  # that it is right, once it is reached
    emitted: float  # that it is emitted
    by_history: float  # the same, whatever the drafter's probabilities


@dataclass
class History:
    rates: dict[Evidence, Rates] = field(default_factory=dict)
    scores: list[Score] | None = None  # of the chain drafted last, if it was scored and not yet verified


UNSEEN = History()  # of a request of which nothing is known
