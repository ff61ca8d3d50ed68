"""Two processes on one machine, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def on_two_processes(script: Path, *arguments: str) -> str:
    """What they wrote to standard output; they must end well."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = subprocess.run(
        [*launcher, str(script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-8000:]
    return result.stdout
