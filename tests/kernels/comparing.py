"""Compares what kernels compute with what is expected. Each comparison is a line of the report of tests/gpu_check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from kernels import range_attention
from kernels.triton import SWITCH

FORMS = ("native", "torch", "triton")  # in which attention of training can run


def choose_form(patch: pytest.MonkeyPatch, form: str) -> None:
    """Let attention of training run in C (on a GPU in Triton), in torch, or in Triton, in this order."""
    patch.setenv(SWITCH, "auto" if form == "native" else form)
    if form != "native":
        patch.setattr(range_attention, "library", lambda: None)


Expected = Tensor | Callable[[], Tensor]  # computed only if it is compared


class Comparisons:
    """`record` takes each line, and `check` raises for those that do not hold: one test makes many comparisons.

    `compiles`: kernels are only launched, so that they are compiled, and nothing is compared.
    """

    def __init__(self, record: Callable[[str, Any], None], *, compiles: bool) -> None:
        self._record, self._compiles, self._wrong = record, compiles, list[str]()

    def close(self, kernel: str, case: str, actual: Tensor, expected: Expected, bound: float) -> None:
        """Compare with a float64 reference: the largest error, relative to the reference's largest value."""
        self._compare(relative_error, kernel, case, actual, expected, bound)

    def same(self, kernel: str, case: str, actual: Tensor, expected: Expected) -> None:
        """Compare bit for bit: the share of elements that differ; none may."""
        self._compare(share_of_wrong, kernel, case, actual, expected, 0.0)

    def _compare(
        self,
        measure: Callable[[Tensor, Tensor], float],
        kernel: str,
        case: str,
        actual: Tensor,
        expected: Expected,
        bound: float,
    ) -> None:
        if self._compiles:
            return
        wanted = expected if isinstance(expected, Tensor) else expected()
        error = measure(actual.detach().cpu(), wanted.detach().cpu())
        ok = error <= bound  # written so that NaN is an error
        line = {"kernel": kernel, "case": case, "error": error, "bound": bound, "ok": ok}
        self._record("kernels/correctness", line)
        if not ok:
            self._wrong.append(f"{kernel}, {case}: error {error} > {bound}")

    def check(self) -> None:
        assert not self._wrong, "; ".join(self._wrong)


def share_of_wrong(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual != expected).double().mean())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error in float64, relative to the largest expected value."""
    actual, expected = actual.double(), expected.double()
    differ = actual != expected  # an expected infinity is no error, a NaN always is
    if not differ.any():
        return 0.0
    return float((actual - expected)[differ].abs().max() / expected[expected.isfinite()].abs().max())
