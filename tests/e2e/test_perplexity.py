"""bench.py perplexity as users run it, and a table of several comparisons."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from scripts.benchmarks import tables
from scripts.benchmarks.perplexity import Scores, add_window
from tests.gguf_writing import write_gguf

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "scripts/bench.py", *command]
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def measure_ways(file: Path, text: Path, *options: str) -> dict[str, Any]:
    ran = run("perplexity", f"model={file}", f"text={text}", "tokens=96", "window=48", *options)
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["tokens"] == 94
    return result["ways"]


def test_how_weights_are_held_changes_no_distribution_and_rounding_activations_does(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    file, text = tmp_path / "tiny.gguf", tmp_path / "text.txt"
    write_gguf(tiny_target_folder, file, (Kind.Q8_0,), tokenizer=True)
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 12)
    ways = measure_ways(file, text, "ways=[widened,native,native:int8,widened:same:bfloat16]")
    assert (ways["widened"]["kl_largest"], ways["widened"]["same_likeliest"]) == (0, 1)
    assert 1 < ways["widened"]["perplexity"] < 2 * 384
    assert abs(ways["native"]["perplexity"] / ways["widened"]["perplexity"] - 1) < 1e-6
    assert ways["native"]["kl_largest"] < 1e-9
    for name in ("native:int8", "widened:same:bfloat16"):
        assert 1e-8 < ways[name]["kl_mean"] <= ways[name]["kl_99"] <= ways[name]["kl_largest"] < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tokens=9000"], "tokens=9000"),
        (["ways=[widened:int8]"], "engine.activations=int8: multiplies integers"),
        (["ways=[native:same:float8]"], "ways=native:same:float8: dtype float8 must be one of"),
        (["ways=[native:same:float32:1]"], "must be weights[:activations[:dtype]] or llama.cpp"),
        (["ways=[llama.cpp:q8]"], "engine.weights=llama.cpp: must be one of"),
        (["ways=[llama.cpp]", "peers=nowhere"], "scripts/peers.sh llama.cpp"),
        (["text="], "text=: must be given"),
    ],
)
def test_ways_that_cannot_be_measured_are_refused(
    tiny_target_folder: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    file, text = tmp_path / "tiny.gguf", tmp_path / "text.txt"
    write_gguf(tiny_target_folder, file, tokenizer=True)
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 120)
    ran = run("perplexity", f"model={file}", *([] if "text=" in options else [f"text={text}"]), *options)
    assert (ran.returncode, message in ran.stderr) == (2, True), ran.stderr[-2000:]


def test_divergence_is_what_float64_says() -> None:
    """Two rows: one whose distributions are equal up to a constant, one of two tokens with known probabilities."""
    reference = torch.tensor([[1.0, 2.0, 3.0], [math.log(0.5), math.log(0.25), math.log(0.25)], [0.0, 0.0, 0.0]])
    logits = torch.tensor([[0.0, 1.0, 2.0], [math.log(0.25), math.log(0.5), math.log(0.25)], [9.0, 0.0, 0.0]])
    scores = Scores()
    add_window(scores, logits, reference, [0, 2, 1])
    assert scores.divergences == pytest.approx([0.0, 0.25 * math.log(2)], abs=1e-6)
    assert scores.agreements == [True, False]
    chosen = 1 / (1 + math.exp(-1) + math.exp(-2))
    assert scores.summary()["perplexity"] == pytest.approx(math.sqrt(1 / (chosen * 0.5)), rel=1e-6)
    assert scores.summary()["kl_mean"] == pytest.approx(0.125 * math.log(2), abs=1e-6)


def bench(target: str, **levels: dict[str, float]) -> dict[str, Any]:
    """Return the document of a bench: tokens/s by number of requests and system."""

    def cell(name: str, speed: float, plain: float) -> dict[str, Any]:
        drafts, ours = ":" in name, not name.startswith("llama")
        return {
            "tokens_per_s": {"median": speed},
            "ratio": {"median": speed / plain},
            "acceptance_length": 2.0 if drafts else None,
            "identical": True if ours else None,
            "agreement": None if ours else [3, 4],
        }

    cells = {
        count.strip("_"): {name: cell(name, speed, speeds["off"]) for name, speed in speeds.items()}
        for count, speeds in levels.items()
    }
    systems = list(dict.fromkeys(name for speeds in levels.values() for name in speeds))
    config = {"systems": systems, "never_slower": None, "model": {"name": "demo"}}
    return {"target": {"path": target, "fingerprint": target}, "config": config, "results": {"0": cells}}


def test_several_benches_in_one_table() -> None:
    few = bench("a.gguf", _1={"off": 100, "head:chain3": 150, "llama.cpp": 80})
    many = bench("a.gguf", _8={"off": 300, "llama.cpp": 90})
    assert tables.of_several([few, many]).splitlines() == [
        "|  | tokens/s at 1 | tokens/s at 8 | τ | same answers |",
        "| --- | --- | --- | --- | --- |",
        "| plain | 100 (1.00) | 300 (1.00) |  | all |",
        "| head, chain 3 | 150 (1.50) |  | 2.00 | all |",
        "| llama.cpp | 80 (0.80) | 90 (0.30) |  | 6 of 8 |",
    ]
