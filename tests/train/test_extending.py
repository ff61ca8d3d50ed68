"""A run with schedule=wsd that is extended equals a run that had the larger budget from the start."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infer.options.cli import compose
from tests.train.running import assert_equal, run
from train.config import TrainConfig
from train.loop import Run, train
from train.publishing.trackers import read_metrics
from train.storage.run_folder import read_budget

WSD = ["optim.schedule=wsd", "optim.decay=0.25", "optim.warmup_steps=2", "export=last", "checkpoint_every=3"]


@pytest.fixture
def overrides(settings: list[str], tmp_path: Path) -> list[str]:
    return [*settings, *WSD, f"head.path={tmp_path / 'extended'}"]


def names(tmp_path: Path, run: str) -> set[str]:
    return {path.name for path in (tmp_path / run / "checkpoints").glob("step-*")}


def trained(tmp_path: Path, run: str) -> list[tuple[float, float, float]]:
    rows = [row for row in read_metrics(tmp_path / run) if "train/loss" in row]
    return [(row["step"], row["train/loss"], row["train/lr"]) for row in rows]


def stop_at(step: int, patch: pytest.MonkeyPatch) -> None:
    real = Run._between_steps

    def between(self: Run) -> None:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self)

    patch.setattr(Run, "_between_steps", between)


def test_an_extended_run_equals_one_of_the_larger_budget(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Extended after its end and in the middle of its decay; stopped just after its return to the stable checkpoint."""
    run(overrides, "run=whole", "steps=16", f"head.path={tmp_path / 'whole-head'}")

    run(overrides, "run=one", "steps=8")
    assert "step-000006" in names(tmp_path, "one")
    assert (tmp_path / "one" / "checkpoints" / "stable").read_text() == "step-000006\n"
    with monkeypatch.context() as patch:
        stop_at(11, patch)  # of twelve, whose decay begins after nine
        longer = [*overrides, "run=one", "steps=12"]
        assert train(compose("train", TrainConfig, longer), longer) is None
    assert "12 steps (before: 8)" in capsys.readouterr().err
    assert names(tmp_path, "one") == {"step-000009", "step-000011"}
    with monkeypatch.context() as patch:
        stop_at(10, patch)
        longer = [*overrides, "run=one", "steps=16"]
        assert train(compose("train", TrainConfig, longer), longer) is None
    assert "resumed after step 9" in capsys.readouterr().err
    run(overrides, "run=one", "steps=16")
    assert "resumed after step 10" in capsys.readouterr().err

    uninterrupted, extended = (load_file(tmp_path / name / "model.safetensors") for name in ("whole-head", "extended"))
    assert_equal(extended, uninterrupted)
    assert trained(tmp_path, "one") == trained(tmp_path, "whole")
    budget = read_budget(tmp_path / "one")
    assert budget is not None
    assert (budget.decided, budget.warmup) == (16, 2)


def test_the_best_head_of_the_shorter_run_is_not_lost(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That head comes from a decay that the extended run does not have, and is exported until a better one comes."""
    measured = iter([1.0, 30.0, 1.2])  # before the first step, after seven, and after seven again
    monkeypatch.setattr(Run, "_evaluate", lambda self: next(measured))
    best = [*overrides, "run=one", "eval_every=7", "checkpoint_every=7", "keep_checkpoints=5", "export=best"]
    folder = tmp_path / "one" / "checkpoints"
    run(best, "steps=8")
    assert (folder / "best").read_text() == "step-000007\n"
    first = load_file(tmp_path / "extended" / "model.safetensors")
    run(best, "steps=10")
    assert (folder / "best").read_text() == "aside-step-000007\n"
    assert_equal(load_file(tmp_path / "extended" / "model.safetensors"), first)
    current, aside = (load_file(folder / f"{name}step-000007" / "module.safetensors") for name in ("", "aside-"))
    assert any(not torch.equal(value, aside[name]) for name, value in current.items())


def test_what_extends_no_run_is_named(settings: list[str], tmp_path: Path) -> None:
    """The error names the keys, both values, and how to continue from the head in another run."""
    run(settings, "run=one", "steps=2")
    start = re.escape(f"run=<other> head.start_from={tmp_path / 'heads' / 'demo' / 'eagle3'}")
    message = rf"data.num_sequences=30 \(the run has 24\); optim.schedule=wsd \(the run has cosine\).*{start}"
    with pytest.raises(ValueError, match=message):
        run(settings, "run=one", "steps=4", "optim.schedule=wsd", "data.num_sequences=30")
