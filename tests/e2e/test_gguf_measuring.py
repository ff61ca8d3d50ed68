"""What measures GGUF targets beside llama.cpp: files in blocks, bytes per second, perplexity, tables of several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import make_tables
from scripts.document import by_format
from scripts.gguf_files import write_quantised
from tests.gguf_writing import write_gguf

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, *command]
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def test_what_cannot_be_quantised_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Q3_K: no format of weights in blocks; there are Q4_0, "):
        write_quantised(tmp_path, tmp_path / "small", ["Q4_0", "Q3_K"], tmp_path)
    with pytest.raises(ValueError, match=r"llama-quantize: is not there; build it with scripts/peers.sh llama.cpp"):
        write_quantised(tmp_path, tmp_path / "small", ["Q4_0"], tmp_path)
    program = tmp_path / "llama.cpp/build/bin/llama-quantize"
    program.parent.mkdir(parents=True)
    program.touch()
    (tmp_path / "small-Q8_0.gguf").touch()
    with pytest.raises(ValueError, match=r"small-Q8_0.gguf: is there already"):
        write_quantised(tmp_path, tmp_path / "small", ["Q4_0", "Q8_0"], tmp_path)


def test_bytes_per_second_by_format() -> None:
    ran = run("scripts/read_bandwidth.py", "--rounds", "1", "--outputs", "64", "--inputs", "256", "--cold", "1")
    assert ran.returncode == 0, ran.stderr[-2000:]
    *lines, last = ran.stdout.splitlines()
    report = json.loads(last)
    assert lines == by_format(report).splitlines() == make_tables.table_of(report).splitlines()
    assert report["read_gb_s"]["1"] > 0
    assert report["formats"]["bf16"]["bits"] == 16
    assert all(item["gb_s"]["1"] > 0 for item in report["formats"].values())
    ran = run("scripts/read_bandwidth.py", "--formats", "bf16,Q9_9")
    assert (ran.returncode, "--formats Q9_9: not here; there are bf16, " in ran.stderr) == (2, True)


def test_perplexity_hangs_not_on_how_weights_are_held(tiny_target_folder: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "tiny.gguf", tmp_path / "text.txt"
    write_gguf(tiny_target_folder, file, tokenizer=True)
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 12)
    ran = run(
        "scripts/perplexity.py", str(file), str(text), "--tokens", "96", "--window", "48", "--weights", "same,widened"
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["difference"] < 1e-6
    assert 1 < result["perplexity"]["same"] < 2 * 384
    ran = run("scripts/perplexity.py", str(file), str(text), "--tokens", "9000")
    assert ran.returncode == 2
    assert "--tokens 9000" in ran.stderr


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
    assert make_tables.of_several([few, many]).splitlines() == [
        "|  | tokens/s at 1 | tokens/s at 8 | τ | same answers |",
        "| --- | --- | --- | --- | --- |",
        "| plain | 100 (1.00) | 300 (1.00) |  | all |",
        "| head, chain 3 | 150 (1.50) |  | 2.00 | all |",
        "| llama.cpp | 80 (0.80) | 90 (0.30) |  | 6 of 8 |",
    ]
    assert make_tables.of_several([few, bench("b.gguf", _1={"off": 10, "llama.cpp": 8})]).splitlines() == [
        "| target | at once | plain | head, chain 3 | llama.cpp |",
        "| --- | --- | --- | --- | --- |",
        "| a | 1 | 100 (1.00) | 150 (1.50) | 80 (0.80) |",
        "| b | 1 | 10 (1.00) |  | 8 (0.80) |",
    ]
