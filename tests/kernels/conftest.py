"""The C kernels, compiled for other processors than this one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest

from kernels.cpu import library as building
from kernels.cpu.library import library

Compile = Callable[..., ctypes.CDLL]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Return a function that compiles the kernels with further flags and loads them for the rest of the test.

    Tests with the same flags share the library, in all workers.
    """

    def compile_with(*flags: str) -> ctypes.CDLL:
        if building.platform.machine() != "x86_64":
            pytest.skip("not an x86 processor")
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
