"""Planned memory, compared with what torch allocates and what a process uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from infer.options.cli import compose
from models.heads.weights import initialize, set_vocabulary
from models.targets.llama import LlamaTarget
from models.vocab import build_draft_vocab
from tests.train.launching import ROOT
from train.config import TrainConfig
from train.data.sequences import Batch
from train.distributed.strategies import hidden_matrices
from train.features.online import compute_features
from train.loop import train
from train.objectives.registry import OBJECTIVES
from train.planning.memory_plan import memory_parts, parameters, rehearse
from train.preparation.models import make_head, shapes
from train.publishing.trackers import read_metrics

ROWS, LENGTH = 4, 48
HEADS = [
    "head=eagle3", "head=eagle3 objective.fused=true", "head=eagle3 objective.checkpointing=true", "head=eagle",
    "head=medusa", "head=mlp", "head=lstm", "head=mtp", "head=p-eagle", "head=eagle3 objective.fused=false",
    "head=draft-model",
]  # fmt: skip
TRAIN_EACH = """
import json, sys
from infer.options.cli import compose
from train.config import TrainConfig
from train.loop import train
for words in json.loads(sys.argv[1]):
    train(compose("train", TrainConfig, words))
"""


@pytest.fixture
def settings(tiny_target_folder: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "eval_draft_tokens=2", "eval_prompts=2",
        "eval_max_tokens=8", "engine.max_tokens_in_cache=1024", "precision=fp32", "tracker=none", "minutes=null",
        "steps=1", "overwrite=true",
    ]  # fmt: skip


@pytest.mark.parametrize("overrides", HEADS)
def test_the_rehearsal_takes_what_a_step_takes(overrides: str, settings: list[str], tiny_target: LlamaTarget) -> None:
    """Compared with the allocator's record of a forward and backward pass, which includes gradients of parameters."""
    config = compose("train", TrainConfig, [*settings, *overrides.split()])
    planned = rehearse(config, shapes(config).target, ROWS, LENGTH)
    head = make_head(config.head, tiny_target.config)
    set_vocabulary(head, *build_draft_vocab(torch.ones(384), head.config.draft_vocab_size, [0]))
    initialize(head, tiny_target, from_target=config.head.name not in ("mlp", "lstm"))
    objective = OBJECTIVES[config.objective.name](head, config.objective)
    ids = torch.randint(1, 384, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.ones(ROWS, LENGTH, dtype=torch.bool), tuple(range(ROWS)))
    features = compute_features(tiny_target, batch, head.config.aux_layers)
    teacher = objective.teach(tiny_target, features.hidden, batch)
    denominators = objective.denominators(batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loss, _ = objective(batch, features, teacher, denominators, True, torch.Generator().manual_seed(1))
        loss.backward()
    probs = teacher.probs if teacher.logits is None else teacher.logits.logits.logits
    measured = peak(record) + probs.nbytes + teacher.hidden.nbytes
    assert measured - 4 * parameters(head)[0] < planned < 1.3 * measured


def peak(record: Any) -> int:
    """Return the highest number of bytes allocated during the profile, from the allocator's events in order."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        highest = max(highest, current)
    return highest


def test_a_larger_batch_takes_as_much_more_as_planned(settings: list[str], tmp_path: Path) -> None:
    """Measured on the processes of two real runs; what a small batch takes already is Python and torch."""
    rows = [json.dumps({"text": f"{number}: " + "x = y + 1; " * 40}) for number in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    base = [*settings, "data=files", f"data.path={tmp_path / 'rows.jsonl'}", "data.responses=given"]
    runs = [[*base, "features.cache_gb=0", f"run=rows-{size}", f"batch_size={size}"] for size in (2, 64)]
    command = [sys.executable, "-c", TRAIN_EACH, json.dumps(runs)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=900)
    used = [
        next(row["train/memory_bytes"] for row in read_metrics(tmp_path / f"rows-{size}") if "train/loss" in row)
        for size in (2, 64)
    ]
    planned = []
    for overrides in runs:
        result = train(compose("train", TrainConfig, [*overrides, "check=true"]))
        assert result is not None
        planned.append(result["check"]["memory_bytes"])
    assert used[1] - used[0] > 1e8  # otherwise it is lost in what Python itself uses
    assert 0.75 < (planned[1] - planned[0]) / (used[1] - used[0]) < 1.5  # measured: 0.94


def test_a_fused_loss_keeps_no_probabilities(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks smaller than the batch; an unfused loss keeps the teacher's probabilities for every slot."""
    monkeypatch.setattr("train.objectives.teacher.CHUNK_ELEMENTS", 2**15)
    plans = {}
    for fused in ("true", "false"):
        config = compose("train", TrainConfig, [*settings, "head=eagle3", f"objective.fused={fused}"])
        target = shapes(config).target
        plans[fused] = rehearse(config, target, 64, LENGTH)
        probabilities = 4 * 64 * LENGTH * make_head(config.head, target.config).config.draft_vocab_size
    assert plans["false"] - plans["true"] > 0.5 * probabilities  # a fused loss holds gradients of its own


def test_the_memory_taken_is_not_that_of_who_started_the_process() -> None:
    ballast = bytearray(2**30)
    ballast[:: 2**12] = b"x" * len(ballast[:: 2**12])  # every page
    code = "import torch; from train.step_clock import memory_bytes; print(memory_bytes(torch.device('cpu')))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert 2**26 < int(ran.stdout) < len(ballast)


def test_every_copy_is_counted(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(*overrides: str) -> dict[str, int]:
        config = compose("train", TrainConfig, [*settings, *overrides])
        run_shapes = shapes(config)
        return memory_parts(config, run_shapes.target, run_shapes.head, 1000)

    run_shapes = shapes(compose("train", TrainConfig, [*settings, "head=eagle"]))
    borrowed = 2 * 4 * run_shapes.target.embed_tokens.weight.numel()  # it computes logits with the target's LM head
    trained, frozen = parameters(run_shapes.head)
    assert parts("head=eagle")["head and optimiser"] == 16 * trained + 4 * frozen + borrowed
    monkeypatch.setenv("WORLD_SIZE", "4")
    trained, frozen = parameters(shapes(compose("train", TrainConfig, settings)).head)
    assert parts()["head and optimiser"] == 16 * trained + 4 * frozen
    assert parts("parallel=ddp")["head and optimiser"] == 20 * trained + 4 * frozen
    matrices = sum(matrix.numel() for matrix in hidden_matrices(shapes(compose("train", TrainConfig, settings)).head))
    assert parts("optim=muon")["head and optimiser"] == 16 * trained + 4 * frozen - 4 * matrices
    copies = 8 * (trained + frozen) + 4 * trained  # gathered, measured and saved; a gradient
    assert parts("parallel=fsdp")["head and optimiser"] == (16 * trained + 4 * frozen) // 4 + copies
    assert parts("parallel=zero2")["head and optimiser"] == 16 * trained // 4 + copies
    assert parts("engine.kv_dtype=fp8")["KV"] * 4 == parts()["KV"]
    half = parts("model.dtype=bfloat16")
    assert half["head and optimiser"] == parts()["head and optimiser"] + 2 * (trained + frozen)
