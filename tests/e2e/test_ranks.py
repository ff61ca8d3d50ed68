"""Tensor parallelism as a user starts it; no process is left, however rank 0 ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
StartedHere = Callable[[], list[int]]

pytestmark = pytest.mark.slow


def command(target: Path, head: Path, *extra: str) -> list[str]:
    overrides = [
        "model=demo",
        f"model.path={target}",
        "model.device=cpu",
        f"head.path={head}",
        "prompt=def main(",
        "seed=1",
    ]
    return ["infer/generate.py", *overrides, "temperature=0.8", "ignore_eos=true", "engine.max_batch=4", *extra]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def text_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\ndemo, float32")[0]


def test_both_ways_to_start_give_the_text_of_one_process(
    tiny_target_folder: Path, tiny_head_folder: Path, started_here: StartedHere
) -> None:
    plain = command(tiny_target_folder, tiny_head_folder, "max_tokens=24")
    expected = text_of(run([sys.executable, *plain, "proposer=none"]))
    assert len(expected) > 24
    for start in ([sys.executable], TORCHRUN):
        result = run([*start, *plain, "engine.tensor_parallel=2"])
        assert text_of(result) == expected
        assert "ranks                   2, each with a part of the target" in result.stdout
        assert "Traceback" not in result.stderr
        assert started_here() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_others_end_with_rank_0(
    tiny_target_folder: Path, tiny_head_folder: Path, started_here: StartedHere, number: int, tmp_path: Path
) -> None:
    endless = command(tiny_target_folder, tiny_head_folder, "max_tokens=400", "engine.tensor_parallel=2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    leader = subprocess.Popen(
        [sys.executable, *endless], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert leader.stdout is not None
        assert leader.stdout.read(len("def main(") + 1)  # generation has begun
        assert len(started_here()) == 2
        leader.send_signal(number)
        leader.wait(300)
        deadline = time.monotonic() + 300
        while started_here():
            assert time.monotonic() < deadline, "a rank outlives rank 0"
            time.sleep(0.05)
    finally:
        leader.kill()
        leader.wait()
        leader.stdout.close()
    assert list(tmp_path.glob("headway-*")) == []


def test_a_mistake_is_one_clear_line(tiny_target_folder: Path, tiny_head_folder: Path) -> None:
    plain = command(tiny_target_folder, tiny_head_folder)
    result = run([sys.executable, *plain, "engine.tensor_parallel=3"])
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: engine.tensor_parallel=3: the target's 2 KV heads")
    result = run([*TORCHRUN, *plain])
    assert result.returncode != 0
    assert "error: engine.tensor_parallel=1: started as 2 processes; say engine.tensor_parallel=2" in result.stderr
