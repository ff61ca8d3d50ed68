"""bench.py evaluate as a user runs it on the tiny target: cells, what is tracked, the document printed last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.evaluate import names_of
from tests import manual_tables as tables

ROOT = Path(__file__).resolve().parents[2]


def test_files_are_told_apart() -> None:
    assert names_of(["a/own.jsonl", "/b/test.jsonl.xz", "c/test.jsonl"]) == ["own", "b/test", "c/test"]


@pytest.mark.slow
def test_an_evaluation_of_two_files(tiny_target_folder: Path, tiny_head_folder: Path, tmp_path: Path) -> None:
    rows = [{"question": f"say {number} " + "again " * 6 * number} for number in range(4)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"def f{n}(x): return x"}) for n in range(2)))
    command = [
        sys.executable, "scripts/bench.py", "evaluate",
        f"model.path={tiny_target_folder}", f"head.path={tiny_head_folder}",
        f"files=[{tmp_path / 'own.jsonl'},{tmp_path / 'texts.jsonl'}]", "columns={prompt: question}", "max_tokens=8",
        "chat_template=[true,false]", "temperatures=[0,0.8]", "shapes=[chain2,tree6]", "num_prompts=3",
        "concurrency=[1,2]", f"output_dir={tmp_path}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout.splitlines()[-1])
    cells = document["results"]
    assert len(cells) == 32
    templated = [cell for cell in cells if cell["template"] and cell["concurrency"] == 1]
    table = tables.by_shape(document | {"results": templated}).splitlines()
    assert table[0] == "| drafts | data | τ, T = 0 | τ, T = 0.8 | accepted by position | coverage |"
    assert [line.split(" | ")[:2] for line in table[2:5]] == [
        ["| chain 2", data] for data in ("own", "texts", "**mean**")
    ]
    taus = [cell["acceptance_length"] for cell in templated if (cell["shape"], cell["temperature"]) == ("chain2", 0)]
    assert f"| **mean** | **{sum(taus) / 2:.2f}** |" in table[4]
    assert table[-1] == "Ids equal to plain decoding's: all."
    assert {(cell["data"], cell["prompts"]) for cell in cells} == {("own", 3), ("texts", 2)}
    assert all(cell["identical"] for cell in cells)
    assert all(1 <= cell["acceptance_length"] <= 7 and 0 < cell["coverage"] <= 1 for cell in cells)
    assert all(1 <= len(cell["by_position"]) <= (2 if cell["shape"] == "chain2" else 5) for cell in cells)
    for cell in cells:
        # a token outside the draft vocabulary ends a verify step; the head has 128 of 384 tokens, and is random
        assert 0 < cell["cut_short"] <= 1
        assert (cell["cut_short"] == 0) == (cell["coverage"] == 1)
