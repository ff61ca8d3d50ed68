"""bench.py train: our runs as a user makes them, and another library's, a recorded run of which stands for it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infer.options.cli import compose
from scripts.benchmarks.config import TrainingConfig
from scripts.benchmarks.train import read_metrics, summary

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = """
{"train/tokens": 2039, "train/tokens_per_s": 150.5, "train/loss": 27.5, "train/memory_bytes": 2800000000}
{"train/tokens": 4078, "train/tokens_per_s": 200.0, "train/loss": 26.0, "train/memory_bytes": 2900000000}
{"train/tokens": 5078, "train/tokens_per_s": 400.0, "train/loss": 25.5, "train/memory_bytes": 3000000000}
""".lstrip()


def command(*words: object) -> list[str]:
    return [sys.executable, "scripts/bench.py", "train", *map(str, words)]


def test_the_first_update_and_rows_of_an_evaluation_are_left_out() -> None:
    assert read_metrics(WRITTEN + '{"eval/loss": 1.5}\n') == {
        "tokens_per_s": 3039 / (2039 / 200 + 1000 / 400),
        "memory_gb": 3.0,
        "updates": 2,
        "tokens_per_update": 3039 / 2,
        "losses": [26.0, 25.5],
    }


def test_a_ratio_is_of_the_same_round() -> None:
    def runs(*speeds: float, memory: float) -> list[dict[str, Any]]:
        shape = {"updates": 2, "tokens_per_update": 100.0, "losses": [2.0, 1.0]}
        return [{"tokens_per_s": speed, "memory_gb": memory, **shape} for speed in speeds]

    assert summary(runs(50, 30, memory=3.0), runs(100, 120, memory=1.5)) == {
        "tokens_per_s": 40.0, "from_to": [35.0, 45.0], "ratio": 0.375, "ratio_from_to": [0.3125, 0.4375],
        "memory_gb": 3.0, "memory_ratio": 2.0, "updates": 2, "tokens_per_update": 100.0, "losses": [2.0, 1.0],
    }  # fmt: skip


@pytest.mark.parametrize("system", ["speculators", "speculators:1024", "speculators:1x8:fast", "specforge:1x8"])
def test_a_system_that_is_none_is_named(system: str) -> None:
    with pytest.raises(ValueError, match=f"systems={system}: must be headway or speculators:<rows>x<tokens>, with"):
        compose("bench_train", TrainingConfig, [f"systems=[headway,'{system}']"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["peers=nowhere"], "nowhere/speculators/bin/python is not there; build it with scripts/peers.sh speculators"),
        (["head=medusa"], "head=medusa: must be one of eagle3, dflash"),
        (["steps=1"], "steps=1: must be at least 2"),
        (["objective.stepz=3"], "objective.stepz: unknown key; did you mean steps?"),
    ],
)
def test_what_cannot_be_measured_is_an_error(words: list[str], message: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        command("model=demo", f"output_dir={tmp_path}", *words), cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: ")
    assert message in ran.stderr


@pytest.mark.slow
def test_both_train_the_same_head_on_the_same_rows(tiny_target_folder: Path, tmp_path: Path) -> None:
    """A script stands for the other environment's Python: it looks at what it is given, and writes a recorded run."""
    python = tmp_path / "peers" / "speculators" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "written").write_text(WRITTEN)
    python.write_text(
        "#!/bin/sh\nset -e\n"
        'ls "$2/run-0-head/config.json" "$2/run-0/data/train.safetensors" "$2/features/manifest.json" >&2\n'
        f'echo "$1 $4 $5 $6" >{shlex.quote(str(tmp_path / "words"))}\n'
        f'mkdir "$3"; cp {shlex.quote(str(tmp_path / "written"))} "$3/metrics.jsonl"\n'
    )
    python.chmod(0o755)
    words = [f"model.path={tiny_target_folder}", "head.draft_vocab_size=128", "data.max_new_tokens=24", "steps=3"]
    words += [
        "batch_size=2",
        "data.num_sequences=6",
        "data.prompt_tokens=16",
        "sequence_length=40",
        "objective.steps=2",
    ]
    words += [f"peers={tmp_path / 'peers'}", f"output_dir={tmp_path}", "rounds=2", "engine.threads=1"]
    words += ["systems=[headway:again,speculators:2x20:eager]"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command(*words), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-2000:]
    *table, last = ran.stdout.splitlines()
    document = json.loads(last)
    assert [line.split(" | ")[0].strip("| ") for line in table[2:]] == list(document["results"])
    assert list(document["results"]) == ["headway", "headway:again", "speculators:2x20:eager"]
    ours, again, theirs = document["results"].values()
    assert (ours["ratio"], ours["memory_ratio"], ours["updates"]) == (1.0, 1.0, 2)
    assert again["losses"] == ours["losses"]
    assert theirs["tokens_per_s"] == pytest.approx(3039 / (2039 / 200 + 1000 / 400))
    assert theirs["memory_gb"] == 3.0
    assert (document["config"]["objective"]["steps"], document["comparison"]["rounds"]) == (2, 2)
    driver = f"tests/peers/speculators_train.py {tiny_target_folder} speculators:2x20:eager 20.0\n"
    assert (tmp_path / "words").read_text() == driver
    assert not [*tmp_path.glob("bench-*")]
