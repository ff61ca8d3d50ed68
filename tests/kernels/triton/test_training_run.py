"""Trains a head for the demo target on a GPU, with the command that users type."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infer.settings.paths import REPO_ROOT
from tests.device import ON_GPU, orders

SECONDS = 60  # that it takes beside `minutes`
STALLED = 120  # seconds beyond that after which it hangs
NEEDED = ("hydra", "omegaconf", "accelerate", "gguf")
RATE = re.compile(r"step/s, loss ([\d.]+), (\d+) tokens/s")


@pytest.mark.gpu(seconds=SECONDS + 30)
@pytest.mark.skipif(not ON_GPU, reason="tests/train runs the command on a CPU")
def test_a_head_for_the_demo_target(record_property, pytestconfig, tmp_path):
    """The speed is that of its last steps, beside other processes on the same GPU."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    minutes, folder = 0.5, Path(orders(pytestconfig).get("work", tmp_path)) / "training"
    words = ["model=demo", "head=eagle3", "tracker=none", f"minutes={minutes}", f"output_dir={folder}"]
    log = folder / "train.log"
    folder.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "train/run.py", *words],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=REPO_ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            timeout=60 * minutes + SECONDS + STALLED,
            check=False,
        )
    said = log.read_text(errors="replace")
    assert done.returncode == 0, said[-2000:]
    rates = [{"loss": float(loss), "tokens_per_s": int(rate)} for loss, rate in RATE.findall(said)]
    assert rates, said[-2000:]
    record_property("training", {"minutes": minutes, "steps_seen": len(rates), **rates[-1]})
