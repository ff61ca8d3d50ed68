from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.triton import SWITCH
from tests.device import ON_GPU

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU the kernels are interpreted, or compiled for one: anew only when they change."""
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.sources("kernels"))


@pytest.fixture
def in_triton(monkeypatch):
    """Dispatch as on a GPU, in the interpreter; or on a GPU, and then what is on the CPU stays in torch."""
    if ON_GPU:
        monkeypatch.delenv(SWITCH, raising=False)
    else:
        monkeypatch.setenv(SWITCH, "triton")
