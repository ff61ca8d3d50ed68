from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.simulated_cuda.install import simulated_cuda
from tests.simulated_cuda.machine import Machine
from tests.simulated_cuda.serving import CONTROL
from tests.simulated_cuda.targets import write_target

if torch.cuda.is_available():
    pytest.skip("a GPU is simulated only where there is none", allow_module_level=True)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("simulated"))


@pytest.fixture
def cuda(target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine of two devices that checks all kernels but computes only those that decide on the course of a step."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of measured costs
    with simulated_cuda(computed=CONTROL) as machine:
        yield machine


@pytest.fixture
def computing_cuda(target_folder: Path) -> Iterator[Machine]:
    """The same, with all kernels computed."""
    with simulated_cuda() as machine:
        yield machine
