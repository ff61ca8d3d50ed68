"""Results of several training runs as a table."""

from __future__ import annotations

import json

from scripts.benchmarks import tables


def test_what_differs_and_what_was_reached():
    document = json.loads(tables.newest("smollm2-heads").read_text())
    assert "| probe-eagle-200 | `head=eagle` |" in tables.by_run(document)


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
