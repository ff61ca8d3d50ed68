"""Which results a table is made of, and one of several comparisons."""

from __future__ import annotations

from typing import Any

from tests import manual_tables as tables


def test_a_name_is_not_the_beginning_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name in (
        "auto-demo_2-core-cpu_2026-11-21",
        "auto-demo_2-core-cpu_2026-11-22",
        "auto-code-demo_h100_2026-11-24",
    ):
        (tmp_path / f"{name}.json").write_text('{"machine": {}}')
    assert [file.name for file in tables.newest_by_level("auto").values()] == ["auto-demo_2-core-cpu_2026-11-22.json"]
    assert [file.name for file in tables.newest_by_level("auto-code").values()] == [
        "auto-code-demo_h100_2026-11-24.json"
    ]


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
