"""Pairwise testing: a small set of combinations in which every two values of two factors occur together.

A fault that shows with one value, or with two of different factors, is found as by all combinations. Where factors do
not act on one another, every value of each is enough.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

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


def parametrize_pairs(factors: Mapping[str, Sequence[Any]], *, seed: int = 0, **options: Any) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize` for a pairwise set of the factors, at least two, in place of their product.

    A factor that is named after several arguments, as "heads, kv_heads", has tuples as values. options: parametrize's.
    """
    return _parametrize(
        factors, pairwise({names: range(len(values)) for names, values in factors.items()}, seed), options
    )


def parametrize_each(factors: Mapping[str, Sequence[Any]], **options: Any) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize` for as many cases as the first factor has values; the others take turns.

    The first has the most values. The others count as digits do, the second fastest. Names and options are those of
    `parametrize_pairs`.
    """
    (first, most), *others = ((names, len(values)) for names, values in factors.items())
    places = [{first: index} for index in range(most)]
    for place in places:
        turn = place[first]
        for names, count in others:
            turn, place[names] = divmod(turn, count)
    return _parametrize(factors, places, options)


def _parametrize(
    factors: Mapping[str, Sequence[Any]], places: list[dict[str, int]], options: dict[str, Any]
) -> pytest.MarkDecorator:
    cases = []
    for place in sorted(places, key=lambda place: tuple(place.values())):
        case: list[Any] = []
        for names, index in place.items():
            value = factors[names][index]
            case += value if "," in names else [value]
        cases.append(tuple(case))
    return pytest.mark.parametrize([name.strip() for names in factors for name in names.split(",")], cases, **options)
