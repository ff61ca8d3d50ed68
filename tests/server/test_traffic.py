"""bench.py traffic as a user runs it against a real server: its rows, a second run of the same requests, errors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import bench
from scripts.benchmarks.traffic import Client
from tests.server.harness import MODEL, MakeServer, Server


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["scripts/bench.py", "traffic", *words])
    bench.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def words(tmp_path: Path, tiny_target_folder: Path) -> list[str]:
    for kind, count in (("adds", 5), ("calls", 3)):
        rows = [{"question": f"{kind} {number} " + "again " * number} for number in range(count)]
        (tmp_path / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        "model=demo", f"model.name={MODEL}", f"model.path={tiny_target_folder}", f"output_dir={tmp_path}",
        f"root={tmp_path}", "kinds=[adds,calls]", "+prompts.adds=adds.jsonl",
        "+prompts.calls=[{path: calls.jsonl, rows: 3}]",
        "columns={prompt: question}", "max_tokens=8", "window=2", "concurrency=2",
    ]  # fmt: skip


def test_the_kinds_come_one_after_the_other_and_again_as_they_were(
    server: Server,
    make_server: MakeServer,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = server.metrics()
    report = run(capsys, monkeypatch, *words, f"url={server.url}")
    after, rows = server.metrics(), report["results"]
    assert [(row["kind"], row["requests"]) for row in rows] == [
        ("adds", 2), ("adds", 2), ("adds", 1), ("calls", 2), ("calls", 1),
    ]  # fmt: skip
    finished = "headway_generation_tokens_total"
    assert sum(row["tokens"] for row in rows) == after[finished] - before[finished]
    assert all(1 <= row["tau"] <= 5 and not row["learning"] for row in rows)
    assert (tmp_path / "bench" / "traffic.png").stat().st_size > 0

    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(report | {"results": rows[1:4]}))
    with make_server(proposer="none") as plain:
        again = run(capsys, monkeypatch, *words, f"url={plain.url}", f"like={earlier}")["results"]
    assert [(row["kind"], row["requests"], row["tau"]) for row in again] == [
        ("adds", 2, None), ("adds", 1, None), ("calls", 2, None),
    ]  # fmt: skip


def test_what_was_measured_before_a_failure_is_kept(
    make_server: MakeServer, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    window, seen = Client.window, list[int]()

    def refused_later(client: Client, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        seen.append(len(prompts))
        return window(client, prompts if len(seen) < 3 else [[10**9]])

    monkeypatch.setattr(Client, "window", refused_later)
    with make_server() as server, pytest.raises(SystemExit):
        run(capsys, monkeypatch, *words, f"url={server.url}")
    told = capsys.readouterr()
    report = json.loads(told.out.splitlines()[-1])
    assert [row["requests"] for row in report["results"]] == seen[:2]
    assert re.search(f"url={server.url}: 400: ", told.err)
    (tmp_path / "earlier.json").write_text(json.dumps(report))
    with pytest.raises(SystemExit):
        run(capsys, monkeypatch, *words, "max_tokens=9", f"like={tmp_path / 'earlier.json'}")
    assert "earlier.json: has max_tokens=8; say the same here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("kinds=[adds,cals]", "kinds=cals: must be one of edits, explanations, adds, calls"),
        ("url=http://127.0.0.1:9", "url=http://127.0.0.1:9: .*; start it with python infer/serve.py"),
        ("like=nowhere.json", "like=nowhere.json: not a result of bench.py traffic"),
        ("prompt_tokens=1", r"prompts.adds=adds.jsonl: .* 1 to 1 are possible; no usable prompt"),
    ],
)
def test_what_cannot_be_sent_is_named(
    server: Server, words: list[str], word: str, message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        run(capsys, monkeypatch, *words, f"url={server.url}", word)

    assert re.search(message, capsys.readouterr().err)
