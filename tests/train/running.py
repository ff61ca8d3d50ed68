"""Complete training runs on the tiny target, in this process and in child processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infer.options.cli import compose
from tests.train.launching import ROOT
from train.config import TrainConfig
from train.loop import train

SETTINGS = [
    "head.draft_vocab_size=200", "data.num_sequences=24", "data.max_new_tokens=24", "data.prompt_tokens=12",
    "sequence_length=40", "batch_size=8", "steps=30", "minutes=null", "eval_every=100", "checkpoint_every=5",
    "eval_prompts=4", "eval_max_tokens=24", "tracker=none", "overwrite=true", "engine.max_tokens_in_cache=2048",
    # fixed here, so that these tests do not depend on the defaults
    "precision=fp32", "log_every=1", "accumulate=1", "objective.steps=5", "eval_draft_tokens=5", "optim.lr=0.001",
    "engine.threads=1",  # a number of threads that adapts would change bits beside busy processes
]  # fmt: skip


def run(settings: list[str], *more: str) -> dict[str, Any]:
    result = train(compose("train", TrainConfig, [*settings, *more]), [*settings, *more])
    assert result is not None
    return result


def leave_out_plots(patch: pytest.MonkeyPatch) -> None:
    """Let runs of this process draw nothing, as without matplotlib, which takes half a second."""
    patch.setattr("train.publishing.publish.draw_plots", lambda *_: [])


def start(settings: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "train" / "run.py"), *settings]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")


def wait_for(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "heads" / "demo" / "eagle3" / "model.safetensors")


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
