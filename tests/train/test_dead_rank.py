"""Two processes: a signal to one stops both, with a checkpoint; if one is killed, the other ends with an error."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train.launching import two_ranks
from train.checkpoint import find_checkpoint
from train.publishing.trackers import read_metrics

BOUND_S = 300


@pytest.fixture
def settings(tiny_target_folder: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "run=torn", "parallel=ddp",
        "head.draft_vocab_size=200", "data.num_sequences=16", "data.max_new_tokens=12", "data.prompt_tokens=12",
        "sequence_length=24", "batch_size=2", "minutes=null", "steps=100000", "eval_every=100000",
        "eval_prompts=2", "eval_max_tokens=8", "tracker=none", "precision=fp32",
        "engine.max_tokens_in_cache=1024", "objective.steps=2", "eval_draft_tokens=2",
    ]  # fmt: skip


def wait_for(file: Path, ranks: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 600
    while not (file.is_file() and file.stat().st_size):
        assert all(rank.poll() is None for rank in ranks), [rank.communicate() for rank in ranks]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def complete_checkpoint(folder: Path) -> Path:
    checkpoint = find_checkpoint(folder)
    assert checkpoint is not None
    for name in ("module", "optimizer", "random"):
        assert load_file(checkpoint / f"{name}.safetensors")
    return checkpoint


@pytest.mark.slow
def test_the_other_process_ends_with_a_clear_error(settings: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "torn" / "checkpoints"
    with two_ranks([*settings, "checkpoint_every=3"]) as ranks:
        wait_for(folder / "latest", ranks)
        ranks[0].send_signal(signal.SIGKILL)
        _, errors = ranks[1].communicate(timeout=BOUND_S)
    assert ranks[1].returncode == 2, errors
    checkpoint = complete_checkpoint(folder)
    last = [line for line in errors.splitlines() if "error" in line][-1]
    assert "parallel=ddp: another process has ended or does not respond (" in last
    assert f"Last good checkpoint: {checkpoint}; resume with: " in last
    assert re.search(r"resume with: .*--nproc_per_node 2 \S*train/run.py", last)
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_process_that_is_told_to_stop_takes_the_other_with_it(settings: list[str], tmp_path: Path) -> None:
    with two_ranks([*settings, "checkpoint_every=100000"]) as ranks:
        wait_for(tmp_path / "torn" / "schedule.json", ranks)
        ranks[1].send_signal(signal.SIGTERM)
        ended = [rank.communicate(timeout=BOUND_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    assert re.search(r"stopped; resume with: .*--nproc_per_node 2 \S*train/run.py", ended[0][1])
    done = max(row["step"] for row in read_metrics(tmp_path / "torn"))
    assert complete_checkpoint(tmp_path / "torn" / "checkpoints").name == f"step-{done:06d}"
