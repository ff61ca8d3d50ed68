"""One of two processes is killed: the other ends by itself, says so, and the last checkpoint is whole."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from train.checkpoint import latest_checkpoint

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 30


@pytest.mark.slow
def test_the_other_process_ends_with_a_clear_error(tiny_target_folder: Path, tmp_path: Path) -> None:
    settings = [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "run=torn", "parallel=ddp",
        "head.draft_vocab_size=200", "data.num_sequences=16", "data.max_new_tokens=12", "data.prompt_tokens=12",
        "sequence_length=24", "batch_size=2", "minutes=null", "steps=100000", "eval_every=100000",
        "checkpoint_every=3", "eval_prompts=2", "eval_max_tokens=8", "tracker=none", "precision=fp32",
        "engine.max_tokens_in_cache=1024", "objective.steps=2", "eval_draft_tokens=2",
    ]  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    # No torchrun: it would end the others itself.
    command = [sys.executable, str(ROOT / "train" / "run.py"), *settings]
    ranks = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    folder = tmp_path / "torn" / "checkpoints"
    try:
        deadline = time.monotonic() + 120
        while not (folder / "latest").is_file():
            assert all(rank.poll() is None for rank in ranks), [rank.communicate() for rank in ranks]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ranks[1].send_signal(signal.SIGKILL)
        _, errors = ranks[0].communicate(timeout=BOUND_S)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 2, errors
    kept = latest_checkpoint(folder)
    assert kept is not None
    last = [line for line in errors.splitlines() if "error" in line][-1]
    assert "parallel=ddp: another process has ended or does not answer" in last
    assert f"Last good checkpoint: {kept}; resume with: torchrun --nproc_per_node 2 train/run.py" in last
    for name in ("module", "optimizer", "random"):
        assert load_file(kept / f"{name}.safetensors")
    assert "Traceback" not in errors
