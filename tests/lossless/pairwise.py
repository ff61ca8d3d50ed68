"""A few out of too many combinations: every two values of two factors meet in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

TRIES = 60


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Greedy: each further combination is the one, of some random ones, in which most pairs meet that have not yet."""
    chance = random.Random(seed)

    def pairs(combination: Mapping[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
        return set(itertools.combinations(combination.items(), 2))

    every = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    waiting = set().union(*map(pairs, every))
    picked = []
    while waiting:
        first, second = min(waiting, key=repr)  # one at least that is new
        tries = [{name: chance.choice(values) for name, values in factors.items()} for _ in range(TRIES)]
        tries = [own | dict((first, second)) for own in tries]
        picked.append(max(tries, key=lambda own: len(pairs(own) & waiting)))
        waiting -= pairs(picked[-1])
    return picked
