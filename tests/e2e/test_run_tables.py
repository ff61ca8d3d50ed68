"""Results of several training runs as a table and as a plot."""

from __future__ import annotations

import json

from scripts.benchmarks import tables


def test_what_differs_what_was_reached_and_what_is_drawn(tmp_path):
    document = json.loads(tables.newest("smollm2-heads").read_text())
    assert "| probe-eagle-200 | `head=eagle` |" in tables.by_run(document)
    runs = document["runs"]
    differences = {name: tables.described(run["differs"]) for name, run in runs.items()}
    curves = tables.curves_of(runs, differences, "eagle3")
    assert {name: len(points) for name, points in curves.items()} == {
        label: len(runs[name]["tau_over_tokens"])
        for label, name in (
            ("eagle3", "smollm2-eagle3-mix"),
            ("eagle3, steps=400, batch_size=2", "probe-eagle3-half-batch"),
            ("eagle", "probe-eagle-200"),
        )
    }
    tables.plot_curves(document, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_name_is_not_the_beginning_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name in (
        "auto-demo_2-core-cpu_2026-11-21",
        "auto-demo_2-core-cpu_2026-11-22",
        "auto-code-demo_h100_2026-11-24",
    ):
        (tmp_path / f"{name}.json").write_text('{"machine": {}}')
    assert tables.newest("auto").name == "auto-demo_2-core-cpu_2026-11-22.json"
    assert tables.newest("auto-code").name == "auto-code-demo_h100_2026-11-24.json"
