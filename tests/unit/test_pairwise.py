"""Every two values of two factors occur together, in fewer cases than the product has, and the same ones each time."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import parametrize_each, parametrize_pairs

FACTORS = {
    "dtype": ["fp32", "bf16"],
    "dim": [16, 64, 80, 128, 256],
    "heads, kv_heads": [(4, 2), (4, 4), (8, 1)],
    "counts": [[1], [7], [1, 1]],  # values need not be hashable
}


@pytest.mark.parametrize("seed", range(3))
def test_all_pairs_occur(seed: int) -> None:
    names, cases = parametrize_pairs(FACTORS, seed=seed).args
    assert names == ["dtype", "dim", "heads", "kv_heads", "counts"]
    found = [{"dtype": case[0], "dim": case[1], "heads, kv_heads": case[2:4], "counts": case[4]} for case in cases]
    for one, other in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(FACTORS[one], FACTORS[other]):
            assert any((case[one], case[other]) == pair for case in found), pair
    assert len(cases) < 20 < 90


def test_the_cases_are_the_same_each_time() -> None:
    assert parametrize_pairs(FACTORS).args == parametrize_pairs(FACTORS).args
    assert parametrize_pairs(FACTORS, ids=str).kwargs == {"ids": str}


def test_each_value_occurs_and_the_rest_take_turns() -> None:
    factors = {"head": "abcde", "dtype, size": [(16, 1), (32, 2)], "greedy": [True, False]}
    names, cases = parametrize_each(factors, ids=str).args
    assert names == ["head", "dtype", "size", "greedy"]
    assert cases == [
        ("a", 16, 1, True),
        ("b", 32, 2, True),
        ("c", 16, 1, False),
        ("d", 32, 2, False),
        ("e", 16, 1, True),
    ]
