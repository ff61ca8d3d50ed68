"""infer/options/environment.py sets variables before libraries read them, as OpenMP's report of its settings shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_threads_spin_shortly_unless_the_user_says_how(chosen: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    process = subprocess.run(
        [sys.executable, "-c", "import infer.options.environment, torch; torch.ones(1)"],
        cwd=ROOT,
        env={**environment, **chosen, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    match = re.search(r"GOMP_SPINCOUNT = '(\d+)'", process.stderr)
    if match is None:
        pytest.skip("this torch has another OpenMP than GNU's")
    assert match[1] == expected
