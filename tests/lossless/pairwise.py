"""Pairwise testing: a small set of combinations in which every two values of two factors occur together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

TRIES = 60


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Return such a set, built greedily: of TRIES random combinations the one with most uncovered pairs is added."""
    rng = random.Random(seed)

    def pairs(combination: Mapping[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
        return set(itertools.combinations(combination.items(), 2))

    combinations = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    uncovered = set().union(*map(pairs, combinations))
    picked = []
    while uncovered:
        first, second = min(uncovered, key=repr)  # so that at least one pair is new
        candidates = [{name: rng.choice(values) for name, values in factors.items()} for _ in range(TRIES)]
        candidates = [candidate | dict((first, second)) for candidate in candidates]
        picked.append(max(candidates, key=lambda candidate: len(pairs(candidate) & uncovered)))
        uncovered -= pairs(picked[-1])
    return picked
