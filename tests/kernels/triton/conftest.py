from __future__ import annotations

import pytest

from kernels.triton import SWITCH


@pytest.fixture
def in_triton(monkeypatch):
    """Dispatch as on a GPU, in the interpreter; or on the GPU itself, where there is one."""
    monkeypatch.setenv(SWITCH, "triton")
