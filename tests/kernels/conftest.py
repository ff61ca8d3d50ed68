"""The C kernels, compiled for other processors than this one; comparisons and times of kernels on any device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kernels.cpu import library as building
from kernels.cpu.level import LEVELS, level
from kernels.cpu.library import library
from tests.device import DEVICE, orders
from tests.kernels.comparing import Comparisons
from tests.kernels.timing import copy_bandwidth, rated, shortest_ms, timing

Compile = Callable[..., ctypes.CDLL]
NEEDS = {"x86-64": "baseline", "x86-64-v3": "avx2", "skylake-avx512": "avx512"}  # the level that runs an architecture


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Return a function that compiles the kernels with further flags and loads them for the rest of the test.

    Tests with the same flags share the library, in all workers. Where this processor, or HEADWAY_CPU_LEVEL, lacks
    instructions of `-march=`, a flag, the test is skipped: loading them would end the process by SIGILL.
    """

    def compile_with(*flags: str) -> ctypes.CDLL:
        if building.platform.machine() != "x86_64":
            pytest.skip("not an x86 processor")
        for architecture in (flag.removeprefix("-march=") for flag in flags if flag.startswith("-march=")):
            if LEVELS.index(NEEDS[architecture]) > LEVELS.index(level()):
                pytest.skip(f"this processor runs no {architecture}")
        monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, *flags))
        folder = tmp_path_factory.getbasetemp()  # of this run; of this worker, if there are several
        folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "compiled"))
        library.cache_clear()
        native = library()
        assert native is not None
        return native

    yield compile_with
    library.cache_clear()


@pytest.fixture
def compare(request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]) -> Comparisons:
    """Compares, and once the test has ended fails if something differed: see `pytest_pyfunc_call`."""
    return Comparisons(record_property, compiles=bool(orders(request.config).get("compiles")))


@pytest.fixture(scope="session")
def pace() -> dict[str, float]:
    """What times are compared with: GB/s of a plain copy, and the time of a call that does next to nothing."""
    return {"copy_gb_s": round(copy_bandwidth(DEVICE), 1), "shortest_ms": shortest_ms(DEVICE)}


@pytest.fixture
def timed(request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """`timed(kernel, case, bytes, call, *args, capture=True)`: one line of times (tests/gpu_check)."""
    compiles = orders(request.config).get("compiles")
    pace = {} if compiles else request.getfixturevalue("pace")
    for name, value in pace.items():
        record_property(name, value)

    def measure(kernel: str, case: str, moved: int, call: Callable[..., Any], *args: Any, capture: bool = True) -> None:
        launch = partial(call, *args)
        if compiles:
            launch()
        else:
            line = timing(kernel, case, DEVICE, moved, launch, capture=capture)
            record_property("kernels/timings", rated(line, pace["copy_gb_s"]))

    return measure


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    result = yield
    if isinstance(compared := pyfuncitem.funcargs.get("compare"), Comparisons):
        compared.check()
    return result
