"""Runs and an evaluation of the tiny target as one result file, as tables and as a plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infer.options.cli import compose
from scripts import collect_runs, make_tables
from train.config import TrainConfig
from train.loop import train

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = [
    "data.num_sequences=8", "data.max_new_tokens=8", "data.prompt_tokens=8",
    "sequence_length=16", "batch_size=4", "steps=4", "eval_every=2", "minutes=null", "eval_prompts=2",
    "eval_max_tokens=8", "tracker=none", "precision=fp32", "engine.max_tokens_in_cache=512", "eval_draft_tokens=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, vocabulary in (("base", 200), ("few", 60)):
        overrides = [f"model.path={tiny_target_folder}", f"output_dir={folder}", f"run={name}"]
        overrides += [f"head.path={folder}/heads/{name}", f"head.draft_vocab_size={vocabulary}"]
        train(compose("train", TrainConfig, [*OVERRIDES, *overrides]))
    return folder


def test_what_differs_what_was_reached_and_what_is_drawn(runs, tmp_path, capsys):
    cell = {"data": "sums", "temperature": 0.0, "shape": "chain5", "prompts": 3, "acceptance_length": 2.5}
    evaluation = {"config": {"head": {"name": "eagle3", "path": "heads/few"}}, "results": [{**cell, "identical": True}]}
    (tmp_path / "eval.json").write_text("a table\n" + json.dumps(evaluation))
    folders = [str(runs / name) for name in ("base", "few")]
    command = [sys.executable, "scripts/collect_runs.py", *folders, str(tmp_path / "eval.json")]
    document = json.loads(subprocess.check_output(command, cwd=ROOT, text=True).splitlines()[-1])

    summaries = document["runs"]
    assert summaries["base"]["differs"] == {}
    assert summaries["few"]["differs"] == {"head.draft_vocab_size": 60}
    assert [summary["draft_vocab_size"] for summary in summaries.values()] == [200, 60]
    assert summaries["few"]["coverage"] < summaries["base"]["coverage"] <= 1
    for summary in summaries.values():
        tokens, taus = zip(*summary["tau_over_tokens"], strict=True)
        assert tokens[0] == 0
        assert tokens[-1] == summary["tokens"] == 2 * tokens[1] > 0
        assert min(taus) >= 1
        assert len(summary["by_position"]) == 2

    table = make_tables.by_run(document)
    assert "| few | `head.draft_vocab_size=60` |" in table
    assert "| τ | sums, T = 0 | ids of plain decoding |" in table
    assert "| few | 2.50 | yes |" in table
    summaries["few"]["differs"] |= {"head.name": "eagle", "objective.name": "eagle"}
    assert "| few | `head=eagle` |" in make_tables.by_run(document)
    differences = {name: make_tables.described(run["differs"]) for name, run in summaries.items()}
    curves = make_tables.curves_of(summaries, differences, ("head", "steps"), "eagle3")
    assert {name: len(points) for name, points in curves.items()} == {"eagle3": 3, "eagle": 3}
    assert list(make_tables.curves_of(summaries, differences, ("data.responses",), "regenerate")) == ["regenerate"]
    make_tables.plot_curves(document, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_what_is_no_finished_run_is_named(runs, tmp_path):
    with pytest.raises(ValueError, match=r"no config\.yaml"):
        collect_runs.read_run(tmp_path)
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.yaml").write_text((runs / "base/config.yaml").read_text().replace("run: base", "run: half"))
    with pytest.raises(ValueError, match="has not finished"):
        collect_runs.read_run(half)


def test_positions_are_those_of_the_exported_head():
    shares = {2: (1.5, 0.4), 4: (1.4, 0.3)}
    rows = [{"step": step, "train/tokens": 100 * step} for step in shares]
    rows += [
        {"step": step, "eval/tau_engine": tau, "eval/acceptance_0": share, "eval/coverage": 1.0}
        for step, (tau, share) in shares.items()
    ]
    for exported in (2, 4):
        curves = collect_runs.curves(rows, exported)
        assert curves["tau_over_tokens"] == [[200, 1.5], [400, 1.4]]
        assert curves["by_position"] == [shares[exported][1]]


def test_a_name_is_not_the_beginning_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    for name in (
        "auto-demo_2-core-cpu_2026-11-21",
        "auto-demo_2-core-cpu_2026-11-22",
        "auto-code-demo_h100_2026-11-24",
    ):
        (tmp_path / f"{name}.json").write_text('{"machine": {}}')
    assert make_tables.newest("auto").name == "auto-demo_2-core-cpu_2026-11-22.json"
    assert make_tables.newest("auto-code").name == "auto-code-demo_h100_2026-11-24.json"
