"""Planned memory, and what a user reads when there is too little of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from infer.options.cli import compose
from tests.forking import Run
from tests.train.launching import ROOT
from train.config import TrainConfig
from train.planning.memory_plan import memory_parts, out_of_memory, parameters
from train.preparation.models import shapes


@pytest.fixture
def settings(tiny_target_folder: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "eval_draft_tokens=2", "eval_prompts=2",
        "eval_max_tokens=8", "engine.max_tokens_in_cache=1024", "precision=fp32", "tracker=none", "minutes=null",
        "steps=1", "overwrite=true", "data.num_sequences=16", "data.max_new_tokens=8", "data.prompt_tokens=8",
    ]  # fmt: skip


LIMITED = """
import os, sys

sys.path.insert(0, os.getcwd())
from infer.options.cli import compose
from train import loop, step_clock
from train.config import TrainConfig

step_clock.free_bytes = lambda device: 32 * 2**20  # when the first update begins
update = loop.Run._forward_backward

def limited(run, *, metrics):
    with step_clock.limited_memory(run.accelerator.device):
        return update(run, metrics=metrics)

loop.Run._forward_backward = update if "check=true" in sys.argv else limited
try:
    loop.train(compose("train", TrainConfig, sys.argv[1:]))
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("check", ["true", "false"])
def test_a_step_beyond_the_memory_names_the_keys(check: str, settings: list[str], forked: Run) -> None:
    words = [*settings, "head=eagle3", "batch_size=256", "sequence_length=48", "objective.fused=false"]
    done = forked(["-c", LIMITED, *words, f"check={check}", "packing=true"])
    cures = r"for the step, a smaller batch_size .*objective\.fused=true; for the features, features\.cache_gb=0"
    said = rf"refused: after step 0: out of memory \(.*\)\. What needs less: {cures}"
    assert re.search(said, done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize(
    "text", ["CUDA out of memory. Tried to allocate 2 GiB\nmore", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"]
)
def test_out_of_memory_on_a_gpu_is_told_from_other_errors(text: str) -> None:
    message = out_of_memory(RuntimeError(text))
    assert message is not None
    assert message.startswith(f"out of memory ({text.splitlines()[0]}). What needs less: for the step, ")
    assert out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert out_of_memory(RuntimeError()) is None


def test_the_memory_taken_is_not_that_of_who_started_the_process() -> None:
    ballast = bytearray(2**30)
    ballast[:: 2**12] = b"x" * len(ballast[:: 2**12])  # every page
    code = "import torch; from train.step_clock import memory_bytes; print(memory_bytes(torch.device('cpu')))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert 2**26 < int(ran.stdout) < len(ballast)


def test_memory_by_part_follows_the_keys(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(*overrides: str) -> dict[str, int]:
        config = compose("train", TrainConfig, [*settings, *overrides])
        run_shapes = shapes(config)
        return memory_parts(config, run_shapes.target, run_shapes.head, 1000)

    trained, frozen = parameters(shapes(compose("train", TrainConfig, settings)).head)
    assert parts()["head and optimiser"] == 16 * trained + 4 * frozen
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parts("parallel=ddp")["head and optimiser"] == 16 * trained + 4 * frozen
    assert parts("parallel=fsdp")["head and optimiser"] == (16 * trained + 4 * frozen) // 4
    assert parts("engine.kv_dtype=fp8")["KV"] * 4 == parts()["KV"]
