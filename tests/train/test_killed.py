"""kill -9 while responses are written or features computed: what was complete is not computed again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.engine import Engine
from tests.forking import Run
from tests.train.running import run
from train.features.store import FeatureStore

CHILD = """
import importlib, os, signal, sys

module, owner, name, calls, *settings = sys.argv[1:]
sys.path.insert(0, os.getcwd())
from infer.options.cli import compose
from train.config import TrainConfig
from train.loop import train

holder = importlib.import_module(module)
holder = getattr(holder, owner) if owner else holder
real, left = getattr(holder, name), int(calls)

def counted(*args, **options):
    global left
    result = real(*args, **options)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(holder, name, counted)
train(compose("train", TrainConfig, settings))
"""


def killed_after(calls: int, function: str, settings: list[str], forked: Run) -> None:
    """Train in a child process that kills itself when `function` (module:owner.name) has returned `calls` times."""
    module, _, path = function.partition(":")
    owner, _, name = path.rpartition(".")
    done = forked(["-c", CHILD, module, owner, name, str(calls), *settings])
    assert done.returncode == -signal.SIGKILL, done.stderr


def counting(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    real: Callable[..., Any] = getattr(owner, name)

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(args)
        return real(self, *args, **options)

    patch.setattr(owner, name, counted)
    return calls


def test_answers(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: Run) -> None:
    overrides = [*settings, "run=one", "stage=regenerate"]
    # the four held-out ones, and eight of twenty-four
    killed_after(12, "train.data.regenerate:write_line", overrides, forked)
    calls = counting(monkeypatch, Engine, "add")
    run(overrides)
    assert len(calls) == 24 - 8
    result = run([*settings, "run=two", "stage=regenerate", f"output_dir={tmp_path / 'elsewhere'}"])
    resumed, uninterrupted = tmp_path / "one" / "data", Path(result["data"])
    assert (resumed / "train.safetensors").read_bytes() == (uninterrupted / "train.safetensors").read_bytes()


def test_features(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: Run) -> None:
    overrides = [*settings, "run=one", "features=offline", "steps=1"]
    run([*settings, "run=answers", "stage=regenerate"])
    # two are written, the third is lost
    killed_after(3, "train.features.store:FeatureStore._compute", overrides, forked)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("shard-*.safetensors")}
    assert len(written) == 2
    computed = counting(monkeypatch, FeatureStore, "_compute")
    run(overrides)
    shards = len(list((tmp_path / "features").rglob("shard-*.safetensors")))
    assert shards > 10
    assert len(computed) == shards - 2
    assert {path: path.stat().st_mtime_ns for path in written} == written
