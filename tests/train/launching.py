"""Two processes on one machine, started by torchrun or without it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def on_two_processes(script: Path, *arguments: str) -> str:
    """Run a script on two processes by torchrun and return its standard output; the processes must succeed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = subprocess.run(
        [*launcher, str(script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=1800,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-8000:]
    return result.stdout


@contextmanager
def two_ranks(settings: list[str], script: Path = ROOT / "train" / "run.py") -> Iterator[list[subprocess.Popen[str]]]:
    """Start a script on two ranks without torchrun, which would end the other rank when one ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *settings],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
