"""Settings that cannot work or have no effect are refused at once, by check=true and by a run before it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from infer.options.cli import compose, save_config
from train.config import TrainConfig
from train.features.store import MANIFEST
from train.loop import train

FILES = "data=files data.path={rows} data.responses=given"
SETTINGS = ["data.num_sequences=6", "eval_prompts=2", "eval_draft_tokens=2", "tracker=none", "minutes=1"]
CASES = [
    ("head=p-eagle parallel=zero3", r"parallel=zero3: head=p-eagle holds mask_hidden .* use parallel=zero2 or"),
    ("head.start_from=no/such/head", r"head\.start_from=no/such/head: .*no exported head"),
    ("head.start_from={head}", r"head\.start_from=.*give the keys of head= that it was trained with"),
    ("head=eagle head.start_from={head}", r"head\.start_from=.*a head of another kind; say head=eagle3"),
    ("tracker=tensorboard", r"tracker=tensorboard: tensorboard is not installed; pip install tensorboard, or tracker="),
    ("tracker=wandb tracker.mode=online", r"tracker\.mode=online: wandb is not installed; pip install wandb, or"),
    ("features=offline features.path={store}", r"features\.path=.*; layers is \[-1, 1\], this run has .* Give another"),
    ("features=offline features.path={other}", r"features\.path=.*; target is 0ther, this run has \w+;.* Give another"),
    ("features=offline features.path={head}", r"features\.path=.*: holds something else than a store of features"),
    ("data.server=http://127.0.0.1:9/v1", r"data\.server=http://127\.0\.0\.1:9/v1: cannot be used"),
    ("stage=regenerate data.server=http://127.0.0.1:9/v1", r"data\.server=.*: cannot be used"),
    (f"{FILES} stage=regenerate", r"stage=regenerate: .*data\.responses=given; leave one of them out"),
    (f"{FILES} data.temperatures=[0.5]", r"data\.temperatures=\[0\.5\]: has no effect here, .*=given; leave it out"),
    (f"{FILES} data.max_new_tokens=5", r"data\.max_new_tokens=5: has no effect here, .*=given; leave it out"),
    ("data.concurrency=2", r"data\.concurrency=2: has no effect here, is of requests, and there is no"),
    ("data=files data.path={rows} data.held_out_path={rows} data.held_out_share=0.2", r"held_out_share=0\.2: has no"),
    ("run=two", r"run=two: .*step-000003 was written by 2 processes, here are 1; resume it with 2"),
]  # fmt: skip


@pytest.fixture
def paths(tiny_head_folder: Path, tmp_path: Path) -> dict[str, Path]:
    """Return the paths that the cases name: a head with 128 draft tokens, rows, and stores with only a manifest."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {n}", "response": f"it is {n}"}) + "\n" for n in range(12)))
    for name, differing in (("store", {"layers": [-1, 1]}), ("other", {"target": "0ther"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(json.dumps(differing))
    checkpoint = tmp_path / "outputs" / "two" / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    (checkpoint / "state.json").write_text('{"step": 3, "processes": 2}')
    return {"head": tiny_head_folder, "rows": rows, "store": tmp_path / "store", "other": tmp_path / "other"}


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
def test_refused_at_once(
    line: str,
    message: str,
    paths: dict[str, Path],
    tiny_target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for missing in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(
        "train.preparation.models.load_target", lambda *parts, **more: pytest.fail("a target was loaded")
    )
    monkeypatch.setattr("train.planning.plan.measure", lambda device, dtype: (1e9, 1e9))
    overrides = line.format(**paths).split()
    keys = {override.partition("=")[0] for override in overrides}
    arguments = [override for override in SETTINGS if override.partition("=")[0] not in keys] + overrides
    arguments += [f"model.path={tiny_target_folder}", f"output_dir={tmp_path / 'outputs'}"]
    if "run=two" in overrides:
        save_config(compose("train", TrainConfig, arguments), tmp_path / "outputs" / "two" / "config.yaml")
    before = sorted(tmp_path.rglob("*"))
    # a run with zero3 is refused earlier, because here it is a single process
    for check in ["check=true", "check=false"][: 1 if "parallel=zero3" in overrides else 2]:
        with pytest.raises(ValueError, match=message):
            train(compose("train", TrainConfig, [*arguments, check]), arguments)
    assert sorted(tmp_path.rglob("*")) == before
