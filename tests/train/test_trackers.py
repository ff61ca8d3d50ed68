"""Trackers: metrics.jsonl always, W&B offline without credentials, no secret anywhere, nothing that hangs."""

from __future__ import annotations

import json
import math
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from infer.config import TrackerConfig, WandbConfig
from train.publishing import trackers as trackers_module
from train.publishing.plots import draw_plots
from train.publishing.trackers import check_tracker, make_trackers, read_metrics, wandb_mode
from train.storage.provenance import redact

SECRETS = ("wandb_api_key", "hf_abcdefghijkl", "hunter2")


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def track(config: TrackerConfig, folder: Path, *, resume_step: int = 0, **settings: Any) -> None:
    folder.mkdir(exist_ok=True)
    trackers = make_trackers(config, folder, "some-run", settings, resume_step=resume_step)
    for step in (1, 2):
        trackers.log(resume_step + step, {"train/loss": 1 / step, "eval/tau_engine": 1.0 + step})
    trackers.finish()


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def appears(text: bytes, folder: Path, seconds: float = 300) -> bool:
    """Return whether `text` appears in a file within `seconds`: W&B writes its files in another process, and late."""
    deadline = time.monotonic() + seconds
    while text not in everything_in(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_metrics_are_written_without_any_tracker(tmp_path: Path) -> None:
    track(TrackerConfig("none"), tmp_path / "run")
    assert read_metrics(tmp_path / "run") == [
        {"step": 1, "train/loss": 1.0, "eval/tau_engine": 2.0},
        {"step": 2, "train/loss": 0.5, "eval/tau_engine": 3.0},
    ]


def test_a_resumed_run_drops_what_comes_again(tmp_path: Path) -> None:
    track(TrackerConfig("none"), tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lo')  # truncated by a kill
    track(TrackerConfig("none"), tmp_path / "run", resume_step=1)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(TrackerConfig("tensorboard"), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert len(read_metrics(tmp_path / "run")) == 2


def test_a_command_that_torchrun_started_waits_for_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts/evaluate.py on the first of two tensor parallel ranks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    track(TrackerConfig("tensorboard"), tmp_path / "run")
    assert not torch.distributed.is_initialized()
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_missing_package_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ValueError, match="tracker=tensorboard: tensorboard is not installed; pip install tensorboard, or"
    ):
        track(TrackerConfig("tensorboard"), tmp_path)


def test_a_tracker_that_fails_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's folder cannot be made, and W&B refuses every row: metrics.jsonl goes on."""
    (tmp_path / "tensorboard").write_text("in the way")
    track(TrackerConfig("tensorboard"), tmp_path)
    assert "note: tracker=tensorboard cannot be used (" in capsys.readouterr().err

    def refuse(values: object, step: int) -> None:
        raise ConnectionError("no network")

    settings = types.SimpleNamespace(base_url="https://x")
    client = types.SimpleNamespace(log=refuse, finish=lambda: None)
    wandb = types.SimpleNamespace(init=lambda **_: client, Settings=lambda **_: settings)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    track(WandbConfig("wandb", mode="offline"), tmp_path, resume_step=2)
    note = "note: tracker=wandb fails and gets nothing more (ConnectionError: no network)\n"
    assert capsys.readouterr().err == note
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_wandb_offline_without_credentials(tmp_path: Path) -> None:
    """The real package: its files land in the run's folder, under an id of its own, without the secrets."""
    settings = {"wandb_api_key": "wandb_api_key-value", "nested": {"note": "hf_abcdefghijkl"}, "lr": 0.1}
    track(WandbConfig("wandb"), tmp_path / "run", **settings)
    run_id = (tmp_path / "run" / "wandb-id").read_text().strip()
    [record] = (tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")
    assert appears(b"train/loss", record.parent)
    stored = everything_in(record.parent)
    assert b"wandb_api_key-value" not in stored
    assert b"hf_abcdefghijkl" not in stored
    assert len(read_metrics(tmp_path / "run")) == 2
    assert [path.name for path in Path.cwd().glob("wandb")] == []


def test_a_run_keeps_its_id_and_shares_it_with_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one name, in two folders; the first is resumed."""
    run_ids: list[str] = []

    def init(**arguments: Any) -> Any:
        run_ids.append(arguments["id"])
        return types.SimpleNamespace(log=lambda *values, **named: None, finish=lambda: None)

    wandb = types.SimpleNamespace(init=init, Settings=lambda **values: types.SimpleNamespace(base_url="https://x"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    for folder in ("one", "other", "one"):
        track(WandbConfig("wandb", mode="online"), tmp_path / folder)
    assert run_ids[0] == run_ids[2] != run_ids[1]


def test_results_go_to_wandb_as_far_as_they_are_let(tmp_path: Path) -> None:
    head = tmp_path / "heads" / "demo" / "eagle3"
    head.mkdir(parents=True)
    (head / "config.json").write_text("{}")
    (tmp_path / "plot.png").write_bytes(draw_plots(tmp_path)[0].read_bytes())
    for name, upload in (("shy", False), ("open", True)):
        (tmp_path / name).mkdir()
        trackers = make_trackers(WandbConfig("wandb", upload=upload), tmp_path / name, name, {}, resume_step=0)
        trackers.log(1, {"train/loss": 1.0})
        trackers.publish([tmp_path / "plot.png"], head, ("latest", "step_3"))
        trackers.finish()
        [record] = (tmp_path / name / "wandb").glob("offline-run-*/run-*.wandb")
        assert list(record.parent.rglob("plot*.png"))
        assert appears(b"train/loss", record.parent)
        assert appears(b"demo-eagle3", record.parent) if upload else b"demo-eagle3" not in everything_in(record.parent)


def test_a_repeated_run_logs_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    client = types.SimpleNamespace(log=lambda values, step=None: sent.append(values), finish=lambda: None)
    settings = types.SimpleNamespace(base_url="https://x")
    wandb = types.SimpleNamespace(init=lambda **_: client, Settings=lambda **_: settings, Image=str)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for resume_step, more in ((0, {}), (1, {}), (1, {"eval/other": 2.0})):
        trackers = make_trackers(WandbConfig("wandb", mode="offline"), tmp_path, "x", {}, resume_step=resume_step)
        trackers.log(1, {"eval/loss": math.nan, **more})
    assert [list(values) for values in sent] == [["eval/loss"], ["eval/other"]]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "eval/loss": None},
        {"step": 1, "eval/other": 2.0},
    ]


def test_an_unreachable_server_means_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real package with a key and a server that refuses connections: no crash, no hang, an offline run."""
    monkeypatch.setattr(trackers_module, "INIT_SECONDS", 1)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    track(WandbConfig("wandb"), tmp_path / "run")
    assert "W&B cannot be reached (CommError: " in capsys.readouterr().err
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
    with pytest.raises(ValueError, match=r"tracker.mode=online: W&B cannot be reached"):
        track(WandbConfig("wandb", mode="online"), tmp_path / "run2")
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"mode=online: there are no credentials for http://127.0.0.1:9; say `wandb"):
        check_tracker(WandbConfig("wandb", mode="online"))


@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")])
def test_no_wandb_is_no_reason_to_stop(
    module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """wandb is not installed, or there is only a folder of that name, which imports as an empty package."""
    monkeypatch.setitem(sys.modules, "wandb", module)
    track(WandbConfig("wandb"), tmp_path / "run")
    assert "wandb is not installed" in capsys.readouterr().err
    assert len(read_metrics(tmp_path / "run")) == 2
    with pytest.raises(ValueError, match=r"tracker.mode=online: wandb is not installed"):
        track(WandbConfig("wandb", mode="online"), tmp_path / "run")


def test_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    auto, home = WandbConfig("wandb"), "https://api.somewhere.com"
    assert wandb_mode(auto, home) == "offline"
    for host in ("api.somewhere.com", "api.wandb.ai"):
        (tmp_path / "netrc").write_text(f"machine {host} login user password " + "x" * 40)
        assert wandb_mode(auto, home) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080/x")
    assert wandb_mode(auto, home) == "offline"
    (tmp_path / "netrc").write_text("machine wandb.example.org:8080 login user password " + "x" * 40)
    assert wandb_mode(auto, home) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode(auto, home) == "disabled"
    assert wandb_mode(WandbConfig("wandb", mode="offline"), home) == "offline"
    monkeypatch.setenv("WANDB_MODE", "")
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example.org")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode(auto, home) == "online"


def test_redact() -> None:
    config = {
        "api_key": "abc", "hf_token": "def", "password": "ghi", "tokenizer": "x", "max_tokens": 5, "key": 7,
        "data": {"prompt_tokens": 64, "path": "https://user:pass@host/x", "other": "https://host/x"},
        "list": ["sk-abcdefgh12", "plain"],
    }  # fmt: skip
    assert redact(config) == {
        "api_key": "***", "hf_token": "***", "password": "***", "tokenizer": "x", "max_tokens": 5, "key": 7,
        "data": {"prompt_tokens": 64, "path": "***", "other": "https://host/x"},
        "list": ["***", "plain"],
    }  # fmt: skip
    assert json.loads(json.dumps(redact({"a": None, "b": [1, 2.5, True]}))) == {"a": None, "b": [1, 2.5, True]}


def test_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    track(TrackerConfig("none"), tmp_path / "run")
    files = draw_plots(tmp_path / "run")
    assert [path.name for path in files] == ["loss.png", "acceptance.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw_plots(tmp_path / "run") == []
    assert "matplotlib is not installed" in capsys.readouterr().err
