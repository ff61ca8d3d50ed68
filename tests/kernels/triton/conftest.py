from __future__ import annotations

import pytest

from kernels.triton import SWITCH
from tests.device import ON_GPU


@pytest.fixture
def in_triton(monkeypatch):
    """Dispatch as on a GPU, in the interpreter; or on a GPU, and then what is on the CPU stays in torch."""
    if ON_GPU:
        monkeypatch.delenv(SWITCH, raising=False)
    else:
        monkeypatch.setenv(SWITCH, "triton")
