"""A tensor parallel rank that is killed ends the other one with an error that names it, whatever that one is doing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 600.0


@contextmanager
def two_ranks(scenario: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start both as torchrun would, which ends a rank itself when the other one has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "lost_worker.py"), scenario, str(folder)],
            env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(("scenario", "killed"), [("loading", 1), ("idle", 0), ("collective", 0), ("collective", 1)])
def test_the_other_rank_ends_with_an_error_that_names_it(tiny_target_folder: Path, scenario: str, killed: int) -> None:
    with two_ranks(scenario, tiny_target_folder) as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n", rank.communicate()[1]
        ranks[killed].send_signal(signal.SIGKILL)
        _, errors = ranks[1 - killed].communicate(timeout=HANG_S)
    assert ranks[1 - killed].returncode == 1, errors
    assert f"engine.tensor_parallel=2: rank {killed} has ended; its own output says why" in errors


def test_a_rank_that_rank_0_started_ends_with_it(
    tiny_target_folder: Path, tmp_path: Path, started_here: Callable[[], list[int]]
) -> None:
    """Nothing of it is left either: neither the process nor the folder of the ranks' store."""
    code = (
        "from infer.engine import Engine; from infer.config import EngineConfig; import time;"
        f"engine = Engine.load({str(tiny_target_folder)!r}, None, EngineConfig(tensor_parallel=2), 'none');"
        "print('ready', flush=True); time.sleep(10**6)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as leader:  # fmt: skip
        assert leader.stdout is not None
        assert leader.stdout.readline() == "ready\n", leader.communicate()[1]
        assert len(started_here()) == 2
        leader.kill()
        _, errors = leader.communicate(timeout=HANG_S)  # until the last process that writes to it has ended
    assert "engine.tensor_parallel=2: rank 0 has ended; its own output says why. Rank 1 ends too" in errors
    assert not list(tmp_path.glob("headway-*"))
