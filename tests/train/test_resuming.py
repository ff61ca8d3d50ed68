"""No interruption changes the head, and a run is resumed with its own settings or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.console.command_words import python_command
from infer.options.cli import compose
from models.heads.base import Head
from tests.train.conftest import full_disk
from tests.train.launching import ROOT
from tests.train.running import assert_equal, run, start, tensors, wait_for
from train import checkpoint, schedule
from train.acceptance import Acceptance
from train.config import TrainConfig
from train.data.regenerate import regenerate
from train.distributed.strategies import Replicated
from train.evaluation import Evaluator
from train.loop import Run, train
from train.publishing.trackers import read_metrics
from train.signals import Interrupted
from train.storage import run_folder


def test_interrupted_in_every_way_it_is_the_same_head(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while responses are generated, SIGUSR1 and kill -9 between steps; then the run completes."""
    elsewhere = tmp_path / "elsewhere"  # or the torn run would reuse its sequences
    run([*settings, "run=steady", f"output_dir={elsewhere}"])

    folder = tmp_path / "torn"

    def steps() -> int:
        return max((int(row["step"]) for row in read_metrics(folder)), default=0)

    def interrupt(answerer: Any, examples: Any, *rest: Any, **options: Any) -> Any:
        if len(examples) == 24:
            os.kill(os.getpid(), signal.SIGINT)
        return regenerate(answerer, examples, *rest, **options)

    torn = [*settings, "run=torn"]
    with monkeypatch.context() as patch:
        patch.setattr("train.data.folder.regenerate", interrupt)
        assert train(compose("train", TrainConfig, torn), torn) is None
    assert capsys.readouterr().err.strip().endswith(f"stopped; resume with: {python_command('train/run.py', *torn)}")
    assert not (folder / "checkpoints").exists()

    process = start(torn)  # in another working directory
    wait_for(process, lambda: steps() >= 7)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, ""), err
    python, script, *overrides = shlex.split(err.strip().rpartition("resume with: ")[2])
    assert shutil.which(python) or Path("/", python).is_file()
    assert overrides == torn
    assert Path("/", script).resolve() == ROOT / "train" / "run.py"
    stopped = int((folder / "checkpoints" / "latest").read_text().split("-")[1])
    assert 7 <= stopped < 30

    process = start(torn)
    wait_for(process, lambda: steps() >= min(stopped + 6, 28))
    process.kill()
    process.communicate(timeout=600)

    assert run(torn)["run"] == "torn"
    assert "resumed after step" in capsys.readouterr().err
    assert_equal(tensors(tmp_path), tensors(elsewhere))
    steady = [row for row in read_metrics(elsewhere / "steady") if "train/loss" in row]
    torn = [row for row in read_metrics(folder) if "train/loss" in row]
    assert [(row["step"], row["train/loss"]) for row in torn] == [(row["step"], row["train/loss"]) for row in steady]
    counts = [0.0, *(row["train/tokens"] for row in torn)]
    durations = [(b - a) / row["train/tokens_per_s"] for a, b, row in zip(counts, counts[1:], torn, strict=False)]
    record = json.loads((tmp_path / "heads" / "demo" / "eagle3" / "provenance.json").read_text())
    assert record["seconds"] == pytest.approx(sum(durations), abs=0.06)  # of the updates of all three processes


def test_a_stop_at_a_step_that_is_left_out_loses_nothing(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Replicated._clip
    norms: list[float] = []

    def clip(self: Replicated) -> float:
        norms.append(real(self))
        if len(norms) != 3:
            return norms[-1]
        os.kill(os.getpid(), signal.SIGTERM)
        return math.inf

    monkeypatch.setattr(Replicated, "_clip", clip)
    overrides = [*settings, "run=one", "checkpoint_every=100"]
    assert train(compose("train", TrainConfig, overrides), overrides) is None
    assert (tmp_path / "one" / "checkpoints" / "latest").read_text() == "step-000003\n"
    assert [row["train/skipped_steps"] for row in read_metrics(tmp_path / "one") if row["step"] == 3] == [1]


@pytest.mark.parametrize(("room", "file"), [(2000, "metrics.jsonl"), (50_000, "checkpoints/step-000006")])
def test_a_disk_that_fills_during_a_run(
    room: int, file: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With `capsys`, output that is printed needs no disk."""
    real, overrides = Run._between_steps, [*settings, "run=one", "steps=6", "checkpoint_every=3"]
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:

        def between(self: Run) -> None:
            real(self)
            if self.step == 4:
                stack.enter_context(full_disk(room))

        patch.setattr(Run, "_between_steps", between)
        with pytest.raises(ValueError, match=rf"{tmp_path}/one/{file}: no room to write it: stopped after \d+ bytes"):
            run(overrides)
    folder = tmp_path / "one" / "checkpoints"
    assert (folder / "latest").read_text() == "step-000003\n"
    assert [path.name for path in folder.glob("step-*")] == ["step-000003"]
    if file == "metrics.jsonl":
        run(overrides)
        assert [row["step"] for row in read_metrics(tmp_path / "one") if "train/loss" in row] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["train.data.prompts.parse_row", "train.features.store.compute_features"])
def test_a_stop_is_heard_while_data_are_read_and_features_computed(
    name: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, function = name.rpartition(".")
    real, calls = getattr(sys.modules[module], function), 0

    def slow(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "say {number}"}}\n' for number in range(20)))
    base = [item for item in settings if not item.startswith("data.prompt_tokens")]
    overrides = [*base, "data=files", f"data.path={tmp_path / 'rows.jsonl'}", "data.held_out_share=0.3", "run=one"]
    monkeypatch.setattr(name, slow)
    assert train(compose("train", TrainConfig, overrides), overrides) is None
    assert calls == 1


def test_a_run_is_resumed_under_its_own_settings_only(settings: list[str], tmp_path: Path) -> None:
    run(settings, "run=one", "steps=2")
    with pytest.raises(ValueError, match=r"begun with other settings: batch_size=4 \(the run has 8\); optim.lr=0.1 \("):
        run(settings, "run=one", "steps=2", "optim.lr=0.1", "batch_size=4")
    for key, value in (("engine.exact", "False"), ("engine.kv_dtype", "fp8"), ("engine.weights", "int8")):
        with pytest.raises(ValueError, match=rf"begun with other settings: {key}={value} \(the run has (same|True)\)"):
            run(settings, "run=one", "steps=2", f"{key}={value}")
    more = ["eval_every=7", "tracker=tensorboard", "engine.max_batch=4"]
    run(settings, "run=one", "steps=2", *more)  # settings that the head does not depend on
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"run=mine: .* holds something else than a training run"):
        run(settings, "run=mine")


def test_a_run_goes_on_under_a_larger_budget(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After its end and after an interruption; further minutes become steps at the pace that the run has measured."""
    overrides, rows = [*settings, "run=one"], lambda: [r for r in read_metrics(tmp_path / "one") if "train/lr" in r]
    run(overrides, "steps=4")
    first = tensors(tmp_path)
    real = Run._between_steps

    def between(self: Run) -> None:
        if self.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_between_steps", between)
        longer = [*overrides, "steps=8"]
        assert train(compose("train", TrainConfig, longer), longer) is None
    assert "8 steps (before: 4)" in capsys.readouterr().err
    run(overrides, "steps=10")
    assert [row["step"] for row in rows()] == list(range(1, 11))
    peak, optim = 0.001, compose("train", TrainConfig, overrides).optim
    totals = [4] * 4 + [8] * 2 + [10] * 4  # the rate is that of a run of this many steps
    expected = [schedule.learning_rate(step, total, optim, peak) for step, total in enumerate(totals)]
    assert [row["train/lr"] for row in rows()] == pytest.approx(expected)
    assert any(not torch.equal(value, first[name]) for name, value in tensors(tmp_path).items())
    assert json.loads((tmp_path / "heads" / "demo" / "eagle3" / "provenance.json").read_text())["steps"] == 10
    with pytest.raises(ValueError, match=r"steps=3: the run has done 10; give at least that, or begin anew"):
        run(overrides, "steps=3")
    budget = run_folder.read_budget(tmp_path / "one")
    assert budget is not None
    timed = dataclasses.replace(budget, steps=None, minutes=25.0, fit=10, pace=300.0)  # as of a run of 25 minutes
    run_folder.write_budget(tmp_path / "one", timed)
    run(overrides, "steps=null", "minutes=35")
    assert [row["step"] for row in rows()] == list(range(1, 13))


@pytest.mark.parametrize("torn", [False, True])
def test_a_run_goes_on_with_the_weights_it_was_begun_with(
    torn: bool, settings: list[str], tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds whether all of its responses were written or none yet."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    overrides = [*settings, f"model.path={folder}", "run=one", "stage=regenerate"]
    with monkeypatch.context() as patch:
        if torn:
            patch.setattr("train.data.folder.collect_parts", interrupted)
        assert (train(compose("train", TrainConfig, overrides), overrides) is None) == torn
    weights = load_file(folder / "model.safetensors")
    before = weights["model.norm.weight"].clone()
    for scale, error in ((2, r"one.data was made from something else: target was \w+ and is \w+; put back"), (1, None)):
        weights["model.norm.weight"] = before * scale
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
            run(overrides)


def test_sequences_of_another_chat_template_are_not_taken(
    settings: list[str], tmp_path: Path, tiny_target_folder: Path
) -> None:
    """Sequences are reused neither by the same run nor by another one."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    overrides = [*settings, f"model.path={folder}", "stage=regenerate"]
    run(overrides, "run=one")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# other #}")
    with pytest.raises(ValueError, match=r"one.data was made from something else: chat_template was \w+ and is \w+"):
        run(overrides, "run=one")
    run(overrides, "run=two")
    first, second = (json.loads((tmp_path / name / "data" / "source.json").read_text()) for name in ("one", "two"))
    assert first["recipe"] != second["recipe"]


def interrupted(*rest: Any) -> Any:
    raise Interrupted


def test_answers_that_the_target_does_not_write_here_are_an_error_that_says_so(
    settings: list[str], tmp_path: Path
) -> None:
    """As on another machine, whose arithmetic rounds differently."""
    run(settings, "run=one", "stage=regenerate")
    path = tmp_path / "one" / "data" / "held_out.safetensors"
    held_out = load_file(path)
    held_out["ids"][-1] += 1
    save_file(held_out, path)
    with pytest.raises(ValueError, match="held-out prompt 3: the target does not write here what it wrote when"):
        run(settings, "run=one")


def test_another_run_takes_the_sequences_that_it_would_make_itself(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(settings, "run=first", "steps=1")
    assert "the target continues" in capsys.readouterr().err
    first = tmp_path / "first" / "data"
    run(settings, "run=wider", "steps=1", "head.draft_vocab_size=384", "sequence_length=30")
    err = capsys.readouterr().err
    assert f"reusing the sequences of {first}" in err
    assert "the target continues" not in err
    for name in ("train.safetensors", "held_out.safetensors", "source.json"):
        assert (tmp_path / "wider" / "data" / name).read_bytes() == (first / name).read_bytes()
    for number, override in enumerate(
        ("seed=1", "data.top_k=5", "eval_max_tokens=20", "model.dtype=bfloat16", "engine.kv_dtype=fp8")
    ):
        run(settings, f"run=other-{number}", "stage=regenerate", override)
        assert "the target continues" in capsys.readouterr().err


def test_unfinished_or_damaged_sequences_are_nobodys_twin(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(settings, "run=first", "steps=1")
    data = tmp_path / "first" / "data"
    (data / "train.safetensors").unlink()
    run(settings, "run=second", "steps=1")
    (tmp_path / "second" / "data" / "source.json").write_text("{")
    capsys.readouterr()
    run(settings, "run=third", "steps=1")
    assert "the target continues" in capsys.readouterr().err


def live(settings: list[str], seconds: float) -> None:
    """Run training in a forked process and kill it after `seconds`."""
    child = os.fork()  # a fork keeps the imports, so that it needs little time
    if child == 0:
        os.setpgrp()
        with contextlib.suppress(BaseException), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
            train(compose("train", TrainConfig, settings))
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_at_any_moment_it_loses_no_more_than_a_checkpoints_worth(settings: list[str], tmp_path: Path) -> None:
    overrides = [*settings, "checkpoint_every=2", "eval_every=6", "steps=10"]
    begun = time.monotonic()
    run([*overrides, "run=whole", f"output_dir={tmp_path / 'elsewhere'}"])
    duration = time.monotonic() - begun
    moments = random.Random(5)
    folder = tmp_path / "torn"
    for _ in range(2):
        before = read_metrics(folder) if folder.is_dir() else []
        live([*overrides, "run=torn"], duration * moments.uniform(0.1, 0.9))
        done = max((row["step"] for row in (read_metrics(folder) if folder.is_dir() else before)), default=0)
        latest = checkpoint.find_checkpoint(folder / "checkpoints")
        saved = int(latest.name.removeprefix("step-")) if latest else 0
        assert saved >= done - 3  # the step in progress, and two since the last checkpoint
    run([*overrides, "run=torn"])
    assert_equal(tensors(tmp_path), tensors(tmp_path / "elsewhere"))


class Killed(BaseException):
    """Ends a run as a kill does: nothing of it catches this."""


@pytest.mark.parametrize("moment", ["before the budget is written", "before the checkpoint", "after a late evaluation"])
def test_no_evaluation_is_logged_twice(
    moment: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed after an evaluation, and then repeated until it ends and once more, evaluates again."""

    def die(*parts: Any, **options: Any) -> Any:
        raise Killed

    overrides = [*settings, "run=one", "steps=6", "eval_every=3", "checkpoint_every=3"]
    if moment == "after a late evaluation":  # interrupted in its evaluation, the run makes it up when it is resumed
        real, measured = Evaluator.measure, []

        def measure(evaluator: Evaluator, head: Head) -> Acceptance:
            measured.append(head)
            if len(measured) == 2:
                raise Interrupted
            return real(evaluator, head)

        with monkeypatch.context() as patch:
            patch.setattr(Evaluator, "measure", measure)
            assert train(compose("train", TrainConfig, overrides), overrides) is None
    place = {
        "before the budget is written": "train.storage.run_folder.write_budget",
        "before the checkpoint": "train.checkpoint.save_checkpoint",
        "after a late evaluation": "train.loop.Run._forward_backward",
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(place, die)
        with pytest.raises(Killed):
            run(overrides)
    for more in ([], [], ["steps=9"], ["steps=9"]):
        run(overrides, *more)
    rows = [row for row in read_metrics(tmp_path / "one") if "eval/loss" in row]
    assert [row["step"] for row in rows] == [0, 3, 6, 9]
