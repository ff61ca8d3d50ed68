"""The C kernels as clang builds them: every level compiles, and the tests of kernels pass on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.declarations import SOURCES
from kernels.cpu.level import COMPILED, LEVELS, level
from kernels.cpu.library import FLAGS
from tests.kernels.test_lower_levels import run

KERNELS = tuple(
    f"tests/kernels/test_{name}.py"
    for name in (
        *("linear", "narrow_linear", "integer_linear", "blocks", "elementwise", "attention", "decoder", "walk"),
        "recurrence",
    )
)
NOISE = "tests/kernels/test_choose.py"  # has the bits of torch, so it is the same whoever compiles it
pytestmark = [
    pytest.mark.sources("kernels", "tests/kernels"),
    pytest.mark.skipif(shutil.which("clang") is None, reason="no clang (scripts/setup_env.sh dev)"),
]


@pytest.mark.parametrize("chosen", LEVELS[: LEVELS.index(level()) + 1])
def test_clang_compiles_every_kernel(chosen: str, tmp_path: Path) -> None:
    """Unoptimised, which is quick and shows all that it does not accept, such as operands that are no literals."""
    sources = [str(file) for file in SOURCES if file.suffix == ".c"]
    command = ["clang", *COMPILED[chosen], *FLAGS[1:], "-O0", *sources, "-o", str(tmp_path / "kernels.so")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.skipif("CC" in os.environ, reason="this is the run with another compiler")
def test_the_tests_of_kernels_pass_on_what_clang_builds() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *KERNELS, NOISE]
    run(command, level(), CC="clang")
