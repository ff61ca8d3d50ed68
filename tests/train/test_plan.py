"""check=true prints what a run would do and makes one update; the plan agrees with what a run then does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.options.cli import compose
from models.layers import Linear
from models.targets import load_target
from models.targets.llama import LlamaTarget
from tests.forking import Run as Forked
from train.config import TrainConfig
from train.loop import Run, StepResult, train
from train.planning import plan as module
from train.planning import precision
from train.planning.plan import check_plan, make_plan, readable


@pytest.fixture
def settings(tiny_target_folder: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path / 'outputs'}", "head.draft_vocab_size=200",
        "data.num_sequences=24", "data.max_new_tokens=24", "data.prompt_tokens=12", "sequence_length=40", "steps=30",
        "eval_prompts=4", "engine.max_tokens_in_cache=2048", "check=true", "precision=fp32",
    ]  # fmt: skip


def check(settings: list[str], *more: str) -> dict[str, Any]:
    """Return the numbers of the plan alone."""
    return check_plan(compose("train", TrainConfig, [*settings, *more])).numbers


def test_the_plan_is_printed_and_tried_and_nothing_is_written(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(compose("train", TrainConfig, [*settings, "data.max_new_tokens=12"]))
    assert result is not None
    numbers = result["check"]
    lines = capsys.readouterr().err.splitlines()
    topics = [line.split(" ")[0] for line in lines]
    assert topics == ["run", "data", "data", "memory", "memory", "disk", "time", "writes", "trial", "trial"]
    assert numbers["trial"]["memory_bytes"] > numbers["memory_bytes"]  # Python and torch are in it
    assert lines[-1].endswith(f"{numbers['trial']['memory_bytes'] / 1e9:.2f} GB at most")
    assert not (tmp_path / "outputs").exists()
    assert (numbers["tokens"], numbers["answers"]) == (24 * 40, 24)
    assert set(numbers["seconds"]) == {"generating", "a step", "all steps"}
    assert numbers["memory_free"] > numbers["memory_bytes"]
    answering = train(compose("train", TrainConfig, [*settings, "stage=regenerate"]))
    assert answering is not None
    assert set(answering["check"]["seconds"]) == {"generating"}
    assert "trial" not in answering["check"]


@pytest.mark.parametrize(
    ("words", "length"),
    [([], 36), (["packing=true"], 40), (["sequence_length=20"], 20), (["data.max_new_tokens=2", "packing=false"], 14)],
)
def test_the_rows_of_the_trial_are_as_long_as_the_data_allow(
    words: list[str], length: int, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[int, ...]]()
    update = Run._forward_backward

    def watched(run: Run, *, metrics: bool) -> StepResult:
        seen.append(run._batch(0).ids.shape)
        seen.append((len(run.prepared.head.target_ids), len(run.prepared.placement.optimizers[0].state) > 0))
        return update(run, metrics=metrics)

    monkeypatch.setattr(Run, "_forward_backward", watched)
    train(compose("train", TrainConfig, [*settings, "batch_size=3", *words]))
    assert seen == [(3, min(16, length)), (200, False), (3, length), (200, True)]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["eval_draft_tokens=4"], 3),
        (["objective.steps=2"], 2),
        (["eval_draft_tokens=4", "objective.steps=4"], None),
        (["eval_draft_tokens=4", "stage=regenerate"], None),
        (["head=medusa", "head.num_heads=4", "eval_draft_tokens=4"], None),
        (["head=draft-model", "eval_draft_tokens=4"], None),
    ],
)
def test_drafts_deeper_than_the_training_are_named(settings: list[str], words: list[str], steps: int | None) -> None:
    base = settings if words[0][:5] != "head=" else [item for item in settings if not item.startswith("head.")]
    config = compose("train", TrainConfig, [*base, "run=one", *words])
    lines = [line.split(" ", 1) for line in make_plan(config).lines]
    named = [text.strip() for topic, text in lines if topic == "depth"]
    expected = f"objective.steps={steps} trains drafts of {steps} tokens and eval_draft_tokens="
    assert len(named) == (steps is not None)
    assert all(text.startswith(expected) for text in named)


def test_the_data_are_read_as_in_the_run(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    rows = [{"prompt": f"f{n}"} for n in range(6)] + [{"messages": turns}, {"title": "no"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    base = [item for item in settings if not item.startswith("data.prompt_tokens")]
    overrides = [*base, "data=files", f"data.path={tmp_path / 'rows.jsonl'}", "data.held_out_share=0.01"]
    numbers = check(overrides)
    assert numbers["rows"] | {"train": 6, "held_out": 1, "dropped": {"bad": 1}} == numbers["rows"]
    assert numbers["answers"] in (6, 7)  # the conversation has two, unless it was the one held out
    assert "rows.jsonl, line 8: must hold one of" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"data\.path=.*none: no such file"):
        check([*overrides, f"data.path={tmp_path / 'none'}"])


def test_what_cannot_work_is_refused(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "free_bytes", lambda device: 10_000)
        with pytest.raises(ValueError, match=r"memory: about .* GB needed, .* are free; most is for the .*: "):
            check(settings)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
        with pytest.raises(ValueError, match=r"disk: .* GB are needed at most, .* give another output_dir="):
            check(settings)
    with pytest.raises(ValueError, match=r"model=no-such-folder: no such folder"):
        check(settings, "model.path=no-such-folder")


def damage(folder: Path, kind: str) -> None:
    """Damage a checkpoint whose weights are in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = dict.fromkeys(names[::2], "one.safetensors") | dict.fromkeys(names[1::2], "two.safetensors")
    if kind == "a tensor is missing":
        del tensors[names[3]]
    if kind == "a tensor of another shape":
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 8)
    for file in ("one.safetensors", "two.safetensors"):
        save_file({name: value for name, value in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").unlink()
    if kind == "a shard is missing":
        (folder / "two.safetensors").unlink()
    if kind == "a shard is cut off":
        content = (folder / "two.safetensors").read_bytes()
        (folder / "two.safetensors").write_bytes(content[: len(content) // 2])
    unreadable = {"the index is unreadable": "model.safetensors.index", "the config is unreadable": "config"}
    if kind in unreadable:
        (folder / f"{unreadable[kind]}.json").write_text('{"weight_map": ')


DAMAGE = {
    "a shard is missing": r"names 'two.safetensors', which is not there; download the checkpoint again",
    "a shard is cut off": r"two.safetensors: cut off: \S+ ends at byte",
    "the index is unreadable": r"model.safetensors.index.json: not valid JSON",
    "the config is unreadable": r"config.json: not valid JSON",
    "a tensor is missing": r"the tensors do not fit the config:\n  \S+: missing",
    "a tensor of another shape": r"k_proj.weight \[8, 8\], .*: expected \[\d+, \d+\] in all",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_target_gives_the_error_of_the_run(
    kind: str, tied: bool, settings: list[str], make_target_folder: Any
) -> None:
    folder = make_target_folder(tie_word_embeddings=tied)
    damage(folder, "")
    check([*settings, f"model.path={folder}"])
    damaged = make_target_folder(tie_word_embeddings=tied)
    damage(damaged, kind)
    with pytest.raises(ValueError, match=DAMAGE[kind]) as planned:
        check([*settings, f"model.path={damaged}"])
    with pytest.raises(ValueError, match=DAMAGE[kind]) as loaded:
        load_target(str(damaged))
    assert str(planned.value) == str(loaded.value)


def test_weights_of_a_hub_id_may_be_fetched_later(
    settings: list[str], tmp_path: Path, make_target_folder: Any, forked: Forked
) -> None:
    """Its configuration alone is in the cache, with the index of the files to come."""
    folder, cached = make_target_folder(), tmp_path / "models--owner--tiny"
    damage(folder, "a shard is missing")
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    kept = [item for item in settings if not item.startswith("model.path=")]
    ran = forked(["train/run.py", *kept, "model=owner/tiny", "data=demo"], env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "memory  about" in ran.stderr
    assert "trial" not in ran.stderr


@pytest.mark.parametrize("stage", ["all", "regenerate"])
@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x"])
def test_a_place_that_cannot_be_written_is_named(stage: str, place: str, settings: list[str]) -> None:
    for mode in ("true", "false"):
        with pytest.raises(ValueError, match=rf"^output_dir={place}: {place}\S*: cannot be written \(") as error:
            train(compose("train", TrainConfig, [*settings, f"output_dir={place}", f"stage={stage}", f"check={mode}"]))
        assert "bytes" not in str(error.value)
    if stage == "all":
        with pytest.raises(ValueError, match=rf"{place}\S*: cannot be written \("):
            check([*settings, f"head.path={place}"])
        with pytest.raises(ValueError, match=rf"{place}\S*: cannot be written \("):
            check([*settings, "features=offline", f"features.path={place}"])


def test_another_runs_settings_are_refused(settings: list[str], tmp_path: Path) -> None:
    overrides = [item for item in settings if item != "check=true"]
    overrides += ["run=one", "steps=1", "tracker=none", "eval_max_tokens=8", "eval_draft_tokens=2", "objective.steps=2"]
    assert train(compose("train", TrainConfig, overrides)) is not None
    with pytest.raises(ValueError, match=r"run=one: .* begun with other settings: batch_size=4"):
        check(overrides, "check=true", "batch_size=4")
    plan = make_plan(compose("train", TrainConfig, overrides))
    assert plan.lines[0].endswith("one, resumed")
    # no more is written than planned
    written = sum(path.stat().st_size for path in (tmp_path / "outputs").rglob("*") if path.is_file())
    assert written < plan.numbers["disk_bytes"]
    assert plan.lines[-1].endswith("(replaced)")


@pytest.mark.parametrize(("seconds", "text"), [(0.5, "0.5 s"), (99, "99 s"), (600, "10 min"), (86400, "24.0 h")])
def test_times_for_people(seconds: float, text: str) -> None:
    assert readable(seconds) == text


def test_a_sharded_target_is_planned_as_one_processs_share(
    settings: list[str], tiny_target: LlamaTarget, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replicated = check([*settings, "parallel=ddp"])["memory_bytes"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    sharded = check([*settings, "parallel=ddp", "features.target=sharded"])["memory_bytes"]
    linear = 4 * sum(module.weight.numel() for module in tiny_target.modules() if isinstance(module, Linear))
    assert replicated - sharded == pytest.approx(linear * 3 / 4, rel=0.02)
    assert "one of 4 processes, which share the target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        ((5e10, 1e10), "(at 50 GFLOP/s in fp32, estimated)"),
        ((2e9, 1e10), "(at 2.00 GFLOP/s in fp32, estimated)"),
    ],
)
def test_times_name_the_speed_that_they_follow_from(
    speed: tuple[float, float], text: str, settings: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "measure", lambda device, dtype: speed)
    check([*settings, "precision=fp32"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("time ")]
    assert line.endswith(text)


def test_the_plan_names_the_precision(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "faster_on_cpu", lambda: precision.Precision("fp32", "bf16 is slow"))
    assert check([*settings, "precision=auto"])["precision"] == "fp32"
    assert "time    precision=fp32: bf16 is slow" in capsys.readouterr().err.splitlines()


def test_time_is_that_of_the_weights_a_step_really_uses(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every depth of a Medusa head has weights of its own; a recurrent head uses the same ones at every depth."""
    monkeypatch.setattr(module, "measure", lambda device, dtype: (1e9, 1e9))

    def seconds(*more: str) -> tuple[float, int]:
        numbers = check([*settings, "features.cache_gb=1", *more])
        return numbers["seconds"]["a step"], numbers["trained_parameters"]

    common = "objective.steps=null", "eval_draft_tokens=2", "head.draft_vocab_size=200"
    two_heads, four_heads = (seconds("head=medusa", f"head.num_heads={count}", *common) for count in (2, 4))
    assert four_heads[0] / two_heads[0] == pytest.approx(four_heads[1] / two_heads[1], rel=0.01)
    one_step, three_steps = (seconds(f"objective.steps={count}", "eval_draft_tokens=1") for count in (1, 3))
    assert three_steps[0] / one_step[0] == pytest.approx(3, rel=0.01)
    parallel, recurrent = seconds("head=p-eagle", "eval_draft_tokens=1"), seconds("objective.steps=8")
    shares = sum(max(0.7**depth, 0.2) for depth in range(8))
    assert parallel[0] / recurrent[0] == pytest.approx(shares / 8 * parallel[1] / recurrent[1], rel=0.01)
