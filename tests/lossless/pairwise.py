"""A few out of too many combinations: every two values of two factors meet in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

TRIES = 60


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Greedy: each further combination is the one, of some random ones, in which most pairs meet that have not yet."""
    rng = random.Random(seed)

    def pairs(combination: Mapping[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
        return set(itertools.combinations(combination.items(), 2))

    combinations = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    uncovered = set().union(*map(pairs, combinations))
    picked = []
    while uncovered:
        first, second = min(uncovered, key=repr)  # one at least that is new
        candidates = [{name: rng.choice(values) for name, values in factors.items()} for _ in range(TRIES)]
        candidates = [candidate | dict((first, second)) for candidate in candidates]
        picked.append(max(candidates, key=lambda candidate: len(pairs(candidate) & uncovered)))
        uncovered -= pairs(picked[-1])
    return picked
