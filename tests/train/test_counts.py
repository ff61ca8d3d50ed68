"""The number of rows at each stage from the data to the last step is printed and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infer.options.cli import compose
from train.config import TrainConfig
from train.loop import train


def test_sequences_that_the_length_leaves_out_are_counted(
    tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"{number} " * (30 if number < 3 else 2) for number in range(12)]
    rows = [json.dumps({"prompt": prompt, "response": "a, b, c"}) for prompt in prompts]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    settings = [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "run=one", "data=files",
        f"data.path={tmp_path / 'rows.jsonl'}", "data.responses=given", "data.chat_template=false",
        "data.held_out_share=0.01", "sequence_length=40", "steps=1", "minutes=null",
        "objective.steps=2", "eval_draft_tokens=2", "eval_prompts=2", "eval_max_tokens=8",
        "tracker=none", "engine.max_tokens_in_cache=1024",
    ]  # fmt: skip
    result = train(compose("train", TrainConfig, settings), settings)
    assert result is not None
    counts = json.loads((Path(result["export"]) / "provenance.json").read_text())["data_counts"]
    left_out = counts["learnt"]["left_out"]
    assert counts["learnt"]["sequences"] + left_out == counts["answers"]["done"] == 11
    assert 0 < left_out <= 3
    assert f"dropped {left_out} sequences with no token left to train on" in capsys.readouterr().err
    assert f"{left_out} more were left out" in (Path(result["export"]) / "README.md").read_text()
