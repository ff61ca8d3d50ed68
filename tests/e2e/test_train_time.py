"""scripts/train_time.py: what it measures over a few steps, and the overrides it refuses before any run begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import train_time

ROOT = Path(__file__).resolve().parents[2]


def time_heads(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/train_time.py", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
def test_two_ways_to_train_a_head_are_timed(tiny_target_folder: Path, tmp_path: Path) -> None:
    overrides = [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "data.num_sequences=8", "data.max_new_tokens=12",
        "data.prompt_tokens=12", "sequence_length=32", "batch_size=2", "minutes=null", "steps=4", "eval_prompts=2",
        "eval_max_tokens=8", "precision=fp32", "engine.max_tokens_in_cache=512", "packing=true",
    ]  # fmt: skip
    result = time_heads("heads=[mlp]", "against=[packing=false]", *overrides)
    assert result.returncode == 0, result.stderr[-4000:]
    timings = json.loads(result.stdout.splitlines()[-1])["heads"]
    assert list(timings) == ["mlp", "mlp-against"]
    for timing in timings.values():
        assert timing["low"] <= timing["tokens_per_s"] <= timing["high"]
        assert 0 < timing["mfu"] < 1
        assert timing["head_s"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batchsize=4"], "error: batchsize: "),
        (["heads=[eagel]"], "error: head=eagel"),
        (["against=[objective.fusd=true]"], "error: objective.fusd: "),
        (["rounds=0"], "error: rounds=0: must be a whole number above 0"),
        (["steps=2", "minutes=null"], "error: steps=2: give more than 2, which warm up"),
    ],
)
def test_what_training_does_not_take_is_refused_with_no_traceback(
    overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["scripts/train_time.py", *overrides])
    assert train_time.main() == 2
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert len(errors.splitlines()) == 1
