"""Launches of compiled kernels that were looked up give the driver what Triton's own launch gives it."""

from __future__ import annotations

import pytest

from kernels.triton.launch import kind
from tests.kernels.triton.compiled import TRITONS, run_in_new_process

compiles = pytest.mark.sources("kernels", "tests/kernels/triton/compiled.py", "tests/kernels/triton/stubbed.py")


@pytest.fixture(scope="module", params=TRITONS)
def launches(request):
    return run_in_new_process("tests.kernels.triton.stubbed", triton=request.param)


@compiles
def test_a_second_launch_is_the_same_and_not_by_triton(launches):
    assert len(launches) >= 14
    for name, case in launches.items():
        assert case["expected"], name
        assert case["actual"] == case["expected"], name
        assert case["by_triton"] == 0, name


@compiles
def test_unaligned_rows_and_another_device_have_kernels_of_their_own(launches):
    aligned, shifted = (launches[name] for name in ("linear, 16 rows", "linear, rows that are not aligned"))
    function = 2
    assert aligned["actual"][0][function] != shifted["actual"][0][function]
    for case in launches.values():
        for here, there in zip(case["actual"], case["elsewhere"], strict=True):
            assert here[function] != there[function]
            assert (here[1], there[1]) == (7, 8), "streams"


@pytest.mark.parametrize(("few", "many"), [(1, 2), (15, 16), (16, 1), (2, 2**31), (16, 2**35)])
def test_integers_of_another_kind_are_told_apart(few, many):
    assert kind(few, True) != kind(many, True)
    assert (kind(few, False) == kind(many, False)) == (many < 2**31)
