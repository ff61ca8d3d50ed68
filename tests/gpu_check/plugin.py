"""A plugin of pytest for one process of a check: it runs a share of the tests marked `gpu`, what matters most first,
begins none for which its time does not suffice, and keeps a report that is whole after every test.

A test states `@pytest.mark.gpu(seconds=..., served=...)`: what it takes at most with its kernels compiled, and whether
it is about serving an 8B model in bf16, which comes first. Tests of one `subject`, a parameter, run in one process,
one after another. What a test hands to `record_property` stands in the report, under the name it gives.
"""

from __future__ import annotations

import infer.options.environment  # noqa: F401

# isort: split

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_check import report as reports

SPOILT = 75  # exit code of a process whose GPU context no longer works
SECONDS = 2.0  # that a test takes which does not say
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # in this order
LINES = ("compare", "timed")  # fixtures of tests that do nothing but launch kernels and compare or time them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-orders", type=json.loads, default={}, help="JSON: what this process does (runner.Job)")


def pytest_configure(config: pytest.Config) -> None:
    orders: Any = config.getoption("gpu_orders")
    config.pluginmanager.register(Worker(orders))


def stated(item: pytest.Item) -> dict[str, Any]:
    """Return what the test states of itself: `seconds` and `served`."""
    marks = [mark.kwargs for mark in item.iter_markers("gpu")]  # the closest first
    return {key: value for kwargs in reversed(marks) for key, value in kwargs.items()}


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def rank(item: pytest.Item) -> int:
    """Return its place in the order: what serves an 8B model, then bf16, fp16 and fp32."""
    dtype = parameters_of(item).get("dtype", torch.bfloat16)
    return 0 if stated(item).get("served") else 1 + (DTYPES.index(dtype) if dtype in DTYPES else 0)


def share(units: Sequence[str], index: int, count: int) -> list[int]:
    """Return the places of a share of `count`: every `count`-th unit, each whole.

    >>> share(["a", "b", "a", "c"], 0, 2)
    [0, 2, 3]
    """
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    chosen = [place for place, unit in enumerate(units) if numbers[unit] % count == index]
    return sorted(chosen, key=lambda place: numbers[units[place]])


class Worker:
    """`orders`: the file of its `report`, `index` and `count` of its share, `until` when it may begin tests, whether
    it launches kernels only (`compiles`), under which name comparisons are listed (`ptxas`). Tests read from it `head`,
    `minutes` and `work`.
    """

    def __init__(self, orders: dict[str, Any]) -> None:
        self.path = Path(orders["report"])
        self.compiles, self.ptxas = orders.get("compiles"), orders.get("ptxas")
        self.until = orders.get("until") or math.inf
        self.index, self.count = orders.get("index", 0), orders.get("count", 1)
        self.document = reports.read(self.path)
        self._begun, self._left_out = 0.0, False
        self._unmade = set[str]()  # errors of fixtures

    def label(self, item: pytest.Item) -> str:
        label = item.nodeid.removeprefix("tests/")
        return f"{self.ptxas}: {label}" if self.ptxas else label

    # ---- which tests, in which order -----------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.get_closest_marker("gpu")]
        if self.compiles or self.ptxas:
            fixtures = set(LINES[: 1 if self.ptxas else 2])
            chosen = [item for item in chosen if fixtures.intersection(getattr(item, "fixturenames", ()))]
        chosen = sorted((item for item in chosen if not self.ptxas or rank(item) <= 1), key=rank)
        units = [str(parameters_of(item).get("subject", item.nodeid)) for item in chosen]
        settled = reports.settled(self.document)
        places = [p for p in share(units, self.index, self.count) if self.label(chosen[p]) not in settled]
        self.document["planned"] = [
            {
                "file": chosen[place].nodeid.partition("::")[0],
                "label": self.label(chosen[place]),
                "unit": units[place],
                "seconds": stated(chosen[place]).get("seconds", SECONDS),
            }
            for place in places
        ]
        items[:] = [chosen[place] for place in places]
        self.save()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            reason = f"{report.nodeid}: it cannot be collected: {str(report.longrepr)[-500:]}"
            self.document["failures"].append(reason)
            self.save()

    # ---- a test --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        seconds, left = stated(item).get("seconds", SECONDS), self.until - time.monotonic()
        self._left_out = False
        if left < seconds:
            pytest.skip(f"it takes up to {seconds:.0f} s, and {max(0, left):.0f} s were left")
        self._begun = time.monotonic()
        self.document["running"] = {"label": self.label(item), "seconds": seconds}
        self.save()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        if not self.compiles:
            return (yield)
        with variants_compiled() as variants:
            try:
                return (yield)
            finally:
                self.document["variants"] = sorted({*self.document.get("variants", ()), *variants})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        outcome, label = (yield), self.label(item)
        if call.excinfo is not None:
            error, text = call.excinfo.value, describe(call.excinfo.value)
            if outcome.skipped or text in self._unmade:
                why = str(error) if outcome.skipped else f"what it needs could not be made: {text}"
                self.document["left_out"].append({"what": label, "why": why})
                self._left_out = True
            elif is_compile_failure(error):
                self.document["compile_failures"][label] = text
            elif not self.compiles:  # the test itself says what else is wrong
                self.document["failures"].append(f"{label}: {text}")
            self._unmade |= {text} if outcome.when == "setup" else set()
            self.save()
        if outcome.when == "teardown":
            for place, result in item.user_properties:
                self.add(place, result)
            if not self._left_out:
                self.document["done"][label] = round(time.monotonic() - self._begun, 2)
            self.document["running"] = None
            self.save()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                try:
                    torch.cuda.synchronize()
                except RuntimeError:  # an illegal access has spoilt the context: another process goes on
                    os._exit(SPOILT)
        return outcome

    def add(self, place: str, result: object) -> None:
        """Add a line of results to those at `place`, keys joined by slashes; a number stands there alone."""
        if place == "kernels/correctness" and self.ptxas:
            place = f"kernels/{self.ptxas}"
        inner: Any = [result] if isinstance(result, dict) else result
        for key in reversed(place.split("/")):
            inner = {key: inner}
        reports.add_to(self.document, inner)

    def pytest_sessionfinish(self) -> None:
        self.document |= {"running": None, "ended": True}
        self.save()

    def save(self) -> None:
        reports.save(self.path, self.document)


@contextmanager
def variants_compiled() -> Iterator[set[str]]:
    """Collect "<kernel> <hash>" of every variant compiled, or found in Triton's cache, within the block."""
    from triton import knobs

    variants: set[str] = set()

    def listen(*, src: Any, metadata: dict[str, Any], **other: Any) -> None:
        variants.add(f"{src.name} {metadata['hash']}")

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield variants
    finally:
        knobs.compilation.listener = before


def is_compile_failure(error: BaseException) -> bool:
    """Return whether Triton could not make a kernel's code, or the GPU cannot hold it."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, CompilationError | OutOfResources | PTXASError) or "PassManager::run failed" in str(error):
        return True
    return error.__cause__ is not None and is_compile_failure(error.__cause__)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
