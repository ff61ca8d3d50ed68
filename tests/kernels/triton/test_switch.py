"""Which devices run in Triton by HEADWAY_KERNELS, and invalid settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.dispatch import uses_triton
from kernels.linear import PackedLinear
from kernels.triton import INTERPRET, SWITCH

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("switch", "on_cpu", "on_cuda"),
    [(None, False, True), ("auto", False, True), ("torch", False, False), ("triton", True, True)],
)
def test_the_switch(monkeypatch, switch, on_cpu, on_cuda):
    monkeypatch.setenv(INTERPRET, "1")
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    assert (uses_triton(CPU), uses_triton(CUDA), uses_triton(torch.device("meta"))) == (on_cpu, on_cuda, False)


def test_a_switch_that_makes_no_sense_is_an_error(monkeypatch):
    monkeypatch.setenv(SWITCH, "cuda")
    with pytest.raises(ValueError, match="HEADWAY_KERNELS=cuda: one of auto, torch, triton"):
        PackedLinear(torch.zeros(4, 4))
    monkeypatch.setenv(SWITCH, "triton")
    monkeypatch.delenv(INTERPRET)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        PackedLinear(torch.zeros(4, 4))


def test_importing_the_package_loads_no_triton_and_shadows_none():
    code = "import sys, kernels.attention, kernels.linear; print('triton' in sys.modules); import triton.language"
    environment = {name: value for name, value in os.environ.items() if name != INTERPRET}
    command = [sys.executable, "-c", code]
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("False\n", 0), result.stderr
