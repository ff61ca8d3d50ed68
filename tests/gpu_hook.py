"""A hook of pytest for a process of tests/gpu_check.py: what matters most first, nothing begun that has no time left, a
line of the report when a test begins and when it has ended.

A test states `@pytest.mark.gpu(seconds=..., served=...)`: what it takes at most with its kernels compiled, and whether
it is about serving an 8B model in bf16, which comes first. Tests of one `subject`, a parameter, run in one process,
one after another. What a test hands to `record_property` stands in its line.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import DTYPES, ON_GPU, describe

SPOILT = 75  # exit code of a process whose GPU context no longer works
STALLED = 60  # seconds beyond four times those of a test after which it hangs


def read(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()] if report.exists() else []


def write(report: Path, **line: Any) -> None:
    """Append the line in one write: processes share the file."""
    with report.open("ab", buffering=0) as file:
        file.write((json.dumps(line) + "\n").encode())


def stated(item: pytest.Item, key: str, default: float) -> float:
    return next((mark.kwargs[key] for mark in item.iter_markers("gpu") if key in mark.kwargs), default)


def parameter(item: pytest.Item, name: str, default: object) -> Any:
    return item.callspec.params.get(name, default) if hasattr(item, "callspec") else default  # pyright: ignore


def rank(item: pytest.Item) -> int:
    """Return its place in the order: what serves an 8B model, then bf16, fp16 and fp32."""
    dtype = parameter(item, "dtype", None)
    return 0 if stated(item, "served", 0) else 1 + (DTYPES.index(dtype) if dtype in DTYPES else 0)


def share(units: Iterable[str], index: int, count: int) -> dict[str, int]:
    """Return a share of `count`, every `count`-th unit, each with its place.

    >>> share(["a", "b", "a", "c"], 0, 2)
    {'a': 0, 'c': 1}
    """
    return {unit: place for place, unit in enumerate(list(dict.fromkeys(units))[index::count])}


class Hook:
    """`orders`: the file of its `report`, its name (`process`), its share (`index` of `count`), `until` when it may
    begin tests, whether kernels are only launched, to compile them (`compiles`), or are those of another `ptxas`.
    """

    def __init__(self, orders: dict[str, Any]) -> None:
        self.orders, self.report, self.process = orders, Path(orders["report"]), orders["process"]
        self.line: dict[str, Any] = {}

    def label(self, item: pytest.Item) -> str:
        made = "compile" if self.orders.get("compiles") else self.orders.get("ptxas", "")
        return f"{made} {item.nodeid.removeprefix('tests/')}".strip()

    def wants(self, item: pytest.Item) -> bool:
        fixtures, ptxas = getattr(item, "fixturenames", ()), self.orders.get("ptxas")
        if ptxas:
            return "compare" in fixtures and rank(item) <= 1
        return not self.orders.get("compiles") or "compare" in fixtures or "timed" in fixtures

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = sorted((item for item in items if item.get_closest_marker("gpu") and self.wants(item)), key=rank)
        units = {item: str(parameter(item, "subject", item.nodeid)) for item in chosen}
        place = share(units.values(), self.orders.get("index", 0), self.orders.get("count", 1))
        lines = read(self.report)
        done = {line["test"] for line in lines if "outcome" in line}
        begun = {line["begun"] for line in lines if "begun" in line and line["process"] == self.process}
        for test in begun - done:  # of the process before this one
            write(self.report, test=test, outcome="failed", why="its process ended in it, or it hung")
        chosen = sorted((item for item in chosen if units[item] in place), key=lambda item: place[units[item]])
        items[:] = [item for item in chosen if self.label(item) not in begun | done]
        planned = {self.label(item): [units[item], stated(item, "seconds", 2.0)] for item in items}
        write(self.report, process=self.process, planned=planned)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            write(
                self.report, test=report.nodeid, outcome="failed", why=f"not collected: {str(report.longrepr)[-500:]}"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        seconds, left = stated(item, "seconds", 2.0), (self.orders.get("until") or math.inf) - time.monotonic()
        self.line = {"test": self.label(item), "outcome": "passed", "seconds": time.monotonic()}
        if left < seconds:
            pytest.skip(f"it takes up to {seconds:.0f} s, and {max(0, left):.0f} s were left")
        write(self.report, process=self.process, begun=self.label(item))
        if ON_GPU:  # how long it takes in the interpreter is not known
            signal.alarm(math.ceil(STALLED + 4 * seconds))  # which ends the process

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        outcome: Any = yield
        if call.excinfo is not None and self.line["outcome"] != "failed":
            error = call.excinfo.value
            self.line |= {"outcome": outcome.outcome, "why": str(error) if outcome.skipped else describe(error)}
        if call.when == "teardown":
            signal.alarm(0)
            self.line["seconds"] = round(time.monotonic() - self.line["seconds"], 2)
            write(self.report, **self.line, results=item.user_properties)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                try:
                    torch.cuda.synchronize()
                except RuntimeError:  # an illegal access has spoilt the context: another process goes on
                    os._exit(SPOILT)
        return outcome
