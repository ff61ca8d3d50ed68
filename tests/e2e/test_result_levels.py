"""Results name the level of the processor that they were measured at, and tables have a block for each level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu.level import machine_level
from scripts.benchmarks.document import describe_machine, generation, result_file
from tests import manual_tables as tables

EPYC = "vendor_id\t: AuthenticAMD\ncpu family\t: {}\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 {}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "zen"),
    [
        (EPYC.format(23, ""), "Zen 2 or older"),
        (EPYC.format(25, ""), "Zen 3"),
        (EPYC.format(25, "avx512f"), "Zen 4"),
        (EPYC.format(26, "avx512f"), "Zen 5"),
        (EPYC.format(26, "").replace("AuthenticAMD", "GenuineIntel"), None),
        ("", None),
    ],
)
def test_the_generation_of_a_processor_that_hides_its_name(cpuinfo: str, zen: str | None) -> None:
    assert generation(cpuinfo) == zen


def test_a_result_names_its_level_and_whether_it_was_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_CPU_LEVEL", raising=False)
    machine = describe_machine() | {"gpu": None, "cpu": "AMD EPYC (Zen 4)", "cores": 2}
    assert (machine["level"], machine["lowered"]) in ((machine_level(), False), (None, False))
    monkeypatch.setenv("HEADWAY_CPU_LEVEL", "baseline")
    if machine["level"] is not None:
        assert describe_machine()["lowered"] == (machine_level() != "baseline")
    lowered, itself = machine | {"level": "avx2", "lowered": True}, machine | {"level": "avx512", "lowered": False}
    assert tables.describe_level(lowered) == "AVX2: HEADWAY_CPU_LEVEL=avx2 on AMD EPYC (Zen 4), 2 cores"
    assert tables.describe_level(itself) == "AVX-512: AMD EPYC (Zen 4), 2 cores"
    names = [result_file("few", "demo", machine).name.rsplit("_", 1)[0] for machine in (lowered, itself)]
    assert names == ["few-demo_2-core-avx2-lowered", "few-demo_2-core-avx512"]


def write(folder: Path, name: str, speed: float, **machine: Any) -> None:
    """Write a bench of plain decoding, `name` as a result file is named without its date."""
    cell = {
        "tokens_per_s": {"median": speed},
        "ratio": {"median": 1.0},
        "acceptance_length": None,
        "identical": True,
        "agreement": None,
    }
    document = {
        "machine": {"cpu": "EPYC", "cores": 2, "commit": "abcdefgh", **machine},
        "target": {"fingerprint": "a", "path": "a.gguf"},
        "config": {"never_slower": None, "systems": ["off"]},
        "results": {"0": {"1": {"off": cell}}},
    }
    (folder / f"{name}.json").write_text(json.dumps(document))


def speeds(page: Path) -> list[str]:
    """Return the captions and speeds of a page's tables."""
    lines = tables.rewrite(page).splitlines()
    return [line for line in lines if line.startswith(("AVX", "| plain"))]


def test_a_table_has_a_block_for_each_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = tmp_path / "README.md"
    page.write_text("<!-- table few -->\n<!-- end -->\n")
    write(tmp_path, "few-demo_2-core-cpu_2026-11-20", 10)
    assert speeds(page) == ["| plain | 10 (1.00) |  | all |"]
    write(tmp_path, "few-demo_2-core-avx2-lowered_2026-11-21", 20, level="avx2", lowered=True)
    lowered = ["AVX2: HEADWAY_CPU_LEVEL=avx2 on EPYC, 2 cores", "| plain | 20 (1.00) |  | all |"]
    assert speeds(page) == lowered
    write(tmp_path, "few-demo_2-core-avx512_2026-11-20", 40, level="avx512", lowered=False)
    best = ["AVX-512: EPYC, 2 cores", "| plain | 40 (1.00) |  | all |"]
    assert speeds(page) == [*best, *lowered]
    write(tmp_path, "few-demo_2-core-avx2_2026-11-20", 30, level="avx2", lowered=False)
    assert speeds(page) == [*best, "AVX2: EPYC, 2 cores", "| plain | 30 (1.00) |  | all |"]
    page.write_text("<!-- table few:avx512 -->\n<!-- end -->\n")
    assert speeds(page) == best
    page.write_text("<!-- table few:amx -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="table few: level amx has no results of all of them"):
        tables.rewrite(page)


def test_several_results_are_of_one_level_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = tmp_path / "README.md"
    page.write_text("<!-- table few many -->\n<!-- end -->\n")
    write(tmp_path, "few-demo_2-core-avx512_2026-11-20", 40, level="avx512", lowered=False)
    write(tmp_path, "few-demo_2-core-avx2_2026-11-20", 20, level="avx2", lowered=False)
    write(tmp_path, "many-demo_2-core-cpu_2026-11-20", 10)
    with pytest.raises(ValueError, match="table few many: no level of processors has results of all of them"):
        tables.rewrite(page)
    write(tmp_path, "many-demo_2-core-avx2_2026-11-21", 30, level="avx2", lowered=False)
    assert speeds(page)[0] == "AVX2: EPYC, 2 cores"
    assert next(iter(tables.newest_by_level("few").values())).name == "few-demo_2-core-avx512_2026-11-20.json"


@pytest.mark.parametrize(("speed", "changed"), [(40, 0), (50, 1)])
def test_the_command_says_whether_a_page_would_change(
    speed: float, changed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "PAGES", [page])
    page.write_text("<!-- table few -->\n<!-- end -->\n")
    write(tmp_path, "few-demo_2-core-avx512_2026-11-20", 40, level="avx512", lowered=False)
    text = tables.rewrite(page)
    page.write_text(text)
    write(tmp_path, "few-demo_2-core-avx512_2026-11-20", speed, level="avx512", lowered=False)
    assert (tables.main(["--check"]), page.read_text()) == (changed, text)


def test_the_front_page_names_the_best_of_the_other_programs_for_every_number_of_requests() -> None:
    def cells(**speeds: float) -> dict[str, Any]:
        return {name.replace("_", ":"): {"tokens_per_s": {"median": speed}} for name, speed in speeds.items()}

    one = cells(off=200.0, head_auto5=300.0, openvino=100.0, openvino_ngram=150.0, vllm=90.0)
    many = cells(off=500.0, head_auto5=450.0, openvino=260.0, openvino_ngram=255.0, vllm=300.0)
    assert tables.by_best_peer({"results": {"0": {"1": one, "8": many}}}).splitlines() == [
        "| tokens/s | 1 request | 8 requests |",
        "| --- | --- | --- |",
        "| Headway | **300** | **450** |",
        "| the fastest other program | 150 (OpenVINO, n-gram lookup) | 300 (vLLM) |",
        "| times as fast | 2.0 | 1.5 |",
    ]
    with pytest.raises(ValueError, match="off: no system of another program"):
        tables.best_peer(cells(off=200.0))
