"""bench.py as a user runs it on the tiny target: every kind of system, and the document printed last."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.config import HeadConfig, ProposerConfig
from infer.console.compare import Pair, Run
from infer.engine import Engine
from infer.options.cli import compose
from scripts import bench
from scripts.benchmarks.compare import measure, slower_than_plain
from scripts.benchmarks.comparison.rounds import order_of, summary
from scripts.benchmarks.comparison.systems import System, make_systems, shaped
from scripts.benchmarks.config import CompareConfig
from scripts.benchmarks.document import without_folders

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("chain5", ProposerConfig(name="head", max_draft_tokens=5)),
        ("tree16", ProposerConfig(name="head", max_draft_tokens=5, tree="beam:4x5:16")),
        ("auto4", ProposerConfig(name="head", max_draft_tokens=4, adaptive=True)),
        ("fixed9", ProposerConfig(name="head", max_draft_tokens=5, tree="measured:9")),
        ("auto-tree8", ProposerConfig(name="head", max_draft_tokens=5, tree="beam:4x5:8", adaptive=True)),
        ("tree48", ProposerConfig(name="head", max_draft_tokens=7, tree="beam:8x7:48")),
    ],
)
def test_a_shape_replaces_whatever_was_configured(shape: str, expected: ProposerConfig) -> None:
    assert shaped(ProposerConfig(name="head", tree=[[0], [1]]), shape) == expected
    assert shaped(ProposerConfig(name="head", tree="beam:2x3:9"), shape) == expected


def test_another_shape_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="shape bush7: must be chain<depth>, auto<depth>, tree<nodes>, auto-tree<nodes> or"
    ):
        shaped(ProposerConfig(name="head"), "bush7")


def cell_of(name: str, *ratios: float) -> dict[str, Any]:
    """Return the cell of a system whose rounds were that many times as fast as plain decoding."""
    run = Run([[1, 2]], 1.0)
    return summary(name, [Pair(run, replace(run, seconds=1 / ratio)) for ratio in ratios], (), greedy=True)


def test_every_system_runs_at_every_place_and_the_order_is_the_same_again() -> None:
    names = ["off", "ngram", "head"]
    rounds = [order_of(names, number, "seed") for number in range(6)]
    assert rounds == [order_of(names, number, "seed") for number in range(6)]
    for turn in (rounds[:3], rounds[3:]):
        assert all(sorted(place) == sorted(names) for place in zip(*turn, strict=True))


def test_slower_than_plain_is_what_noise_does_not_explain() -> None:
    ratios = {"off": (1, 1, 1), "off:again": (0.98, 1.0, 1.02), "head:auto5": (0.9, 0.97, 1.2), "head:chain5": (0.5,)}
    results = {"0": {"4": {name: cell_of(name, *values) for name, values in ratios.items()}}}
    assert slower_than_plain(results, None) == slower_than_plain(results, 0.03) == []
    assert slower_than_plain(results, 0.0) == [
        "head:auto5 at temperature 0, 4 at once: 0.970 (plain decoding repeated: down to 0.990, slack 0.0)"
    ]


def system_of(*seconds: float) -> System:
    """Return a system whose runs, the warm-up first, take these times in turn."""
    durations = itertools.cycle(seconds)
    return lambda tasks, temperature, concurrency: Run([[1, 2, 3]], next(durations))


@pytest.mark.parametrize(("seconds", "rounds"), [((1.0,), 3), ((2.0,), 9), ((2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0), 6)])
def test_what_seems_slower_than_plain_is_measured_again(capsys, seconds, rounds) -> None:
    systems = {"off": system_of(1.0), "off:again": system_of(1.0), "head:auto5": system_of(*seconds)}
    parts = {"head": HeadConfig(name="none"), "proposer": ProposerConfig(name="none")}
    config = CompareConfig(**parts, concurrency=[1], rounds=3, never_slower=0.02)
    results = measure(config, systems, [object()], ())
    assert results["0"]["1"]["head:auto5"]["rounds"] == rounds
    assert bool(slower_than_plain(results, 0.02)) == (seconds == (2.0,))
    message = "seems slower than plain decoding, 3 more rounds: head:auto5 at temperature 0, 1 at once: 0.5"
    assert capsys.readouterr().err.count(message) == rounds // 3 - 1
    config.never_slower = None
    assert measure(config, systems, [object()], ())["0"]["1"]["off"]["rounds"] == 3


def test_a_result_names_no_folder_of_the_machine() -> None:
    paths = {"file": "/elsewhere/asked.jsonl", "model": {"path": str(ROOT / "models/demo")}, "peers": ".peers"}
    assert without_folders({**paths, "systems": ["off"], "rounds": 2}) == {
        "file": "asked.jsonl",
        "model": {"path": "models/demo"},
        "peers": ".peers",
        "systems": ["off"],
        "rounds": 2,
    }


@pytest.mark.slow
def test_a_bench_compares_and_ends_with_a_document(
    tiny_target_folder: Path, tiny_head_folder: Path, tmp_path: Path
) -> None:
    systems = [
        "off",
        "off:again",
        "head:auto2",
        "head:chain2",
        "head:tree6",
        "eagle3:chain1",
        "combined:tree6",
        "suffix",
        "hf",
    ]
    head = tmp_path / "head"
    shutil.copytree(tiny_head_folder, head)
    command = [sys.executable, "scripts/bench.py", f"model.path={tiny_target_folder}", f"head.path={head}"]
    (tmp_path / "heads" / "demo").mkdir(parents=True)
    (tmp_path / "heads" / "demo" / "eagle3").symlink_to(tiny_head_folder)
    command.append(f"output_dir={tmp_path}")
    sizes = ["num_prompts=3", "prompt_tokens=16", "min_tokens=8", "max_tokens=12", "rounds=1", "concurrency=[1,2]"]
    options = [f"systems=[{','.join(systems)}]", "temperatures=[0,0.8]", *sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-2000:]
    results = json.loads(ran.stdout.splitlines()[-1])["results"]
    assert list(results) == ["0", "0.8"]
    for by_concurrency in results.values():
        assert list(by_concurrency) == ["1", "2"]
        for cells in by_concurrency.values():
            assert list(cells) == systems
            assert all(cells[name]["identical"] is True for name in systems if name != "hf")
            assert cells["hf"]["identical"] is None
            assert all(cell["tokens_per_s"]["median"] > 0 for cell in cells.values())
            assert cells["off"]["acceptance_length"] is None
            assert 1 <= cells["head:tree6"]["acceptance_length"] <= 6
            plain, tree = cells["off"]["steps"], cells["head:tree6"]["steps"]
            assert (plain["drafted"], plain["drafted_ms"], tree["plain"] < plain["plain"]) == (0, None, True)
            assert 0 < tree["drafting_ms"] < tree["drafted_ms"]
            assert 2 < tree["drafted_rows"] <= 14
            assert cells["hf"]["steps"] is None


def test_every_subcommand_shows_its_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, key in (
        (["--help"], "systems"),
        (["compare", "-h"], "never_slower"),
        (["evaluate", "-h"], "shapes"),
        (["train", "--help"], "seconds"),
    ):
        monkeypatch.setattr(sys, "argv", ["scripts/bench.py", *words])
        bench.main()
        assert f"\n  {key}:" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["scripts/bench.py", "perplexty"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert capsys.readouterr().err.startswith(
        "error: perplexty: no such subcommand; there are compare, evaluate, train\n"
    )


def test_a_system_that_this_engine_lacks_is_named(tiny_target_folder: Path) -> None:
    overrides = ["model=demo", f"model.path={tiny_target_folder}", "head=none", "systems=[off,head]"]
    config = compose("bench", CompareConfig, overrides)
    engine = Engine.load(config.model, config.head, config.engine, config.proposer)
    named = f"systems: head: this engine has {', '.join(engine.speculator.names)}; train a head"
    with ExitStack() as stack, pytest.raises(ValueError, match=re.escape(named)):
        make_systems(config, engine, stack)
