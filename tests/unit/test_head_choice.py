"""Which head drafts where several might: the best measured one of the target, under whatever name its file has."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.config import GenerateConfig, ModelConfig
from infer.engine import Engine
from infer.generate import run
from infer.options.cli import compose
from infer.options.exported_heads import choose_head, head_folder, with_head
from models.checkpoint import fingerprint
from models.heads.config import HeadConfig
from tests.gguf_writing import Kind, write_gguf

MODEL = ModelConfig("tiny", "nowhere")


def counts(*accepted: int) -> dict[str, Any]:
    """Return what 100 verifies accepted, by position."""
    return {"greedy": {"steps": 100, "emitted": 100 + sum(accepted), "accepted_by_position": accepted}}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where the shipped heads of a target and its exported ones are."""
    monkeypatch.setattr("infer.options.exported_heads.SHIPPED", tmp_path / "models")
    return tmp_path / "models" / "tiny" / "heads", tmp_path / "outputs" / "heads" / "tiny"


@pytest.fixture
def put(tiny_head_folder: Path, places: tuple[Path, Path]) -> Callable[..., Path]:
    def put(place: Path, target: str | None = "t", created: int = 1, **record: Any) -> Path:
        """Put a head there, made for the target of this fingerprint."""
        shutil.copytree(tiny_head_folder, place)
        (place / "provenance.json").write_text(json.dumps({"target_fingerprint": target, **record}))
        os.utime(place / "config.json", (created, created))
        return place

    return put


@pytest.mark.parametrize("name", ["eagle3", "auto"])
def test_a_head_that_drafts_worse_displaces_no_shipped_one(
    name: str, places: tuple[Path, Path], put: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = put(places[0] / "eagle3", counted=counts(70, 50, 20, 6))
    worse = put(places[1] / "eagle3", created=2, counted=counts(8, 0, 0))
    head = choose_head(HeadConfig(name), str(tmp_path / "outputs"), MODEL)
    assert (head.name, head.path) == ("eagle3", str(shipped))
    assert capsys.readouterr().err == (
        f"note: head={name}: {shipped} drafts: τ 2.40 with drafts of 3, and 1.08 of the other, which is newer; "
        f"head={worse} takes that one\n"
    )
    assert choose_head(HeadConfig("eagle3", str(worse)), "x", MODEL) == HeadConfig("eagle3", str(worse))
    assert capsys.readouterr().err == ""


def test_a_head_that_drafts_better_is_taken_and_says_so(
    places: tuple[Path, Path], put: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = put(places[0] / "eagle3", counted=counts(70, 50))
    better = put(places[1] / "eagle3", counted=counts(80, 50))
    assert head_folder(HeadConfig("eagle3"), str(tmp_path / "outputs"), MODEL) == better
    assert choose_head(HeadConfig("auto"), str(tmp_path / "outputs"), MODEL).path == str(better)
    told = capsys.readouterr().err
    assert f"{better} drafts: τ 2.30 with drafts of 2, and 2.20 of the other; head={shipped} takes that one" in told


@pytest.mark.parametrize(
    "record",
    [{}, {"counted": None}, {"target": "other", "counted": counts(1)}, {"counted": counts()}, {"target": None}],
)
def test_the_newest_is_taken_where_nothing_compares_them(
    record: dict[str, Any], places: tuple[Path, Path], put: Callable[..., Path], tmp_path: Path, capsys: Any
) -> None:
    shipped = put(places[0] / "eagle3", counted=counts(70, 50))
    newest = put(places[1] / "eagle3", **record)
    assert choose_head(HeadConfig("eagle3"), str(tmp_path / "outputs"), MODEL).path == str(newest)
    why = "it is the newest, and no measured τ on one target compares them"
    assert f"{newest} drafts: {why}; head={shipped} takes that one" in capsys.readouterr().err


def test_of_several_kinds_the_best_measured_one_is_auto(
    places: tuple[Path, Path], put: Callable[..., Path], tmp_path: Path
) -> None:
    put(places[1] / "mlp", created=3, counted=counts(20))
    best = put(places[1] / "eagle3", created=2, counted=counts(60, 30))
    put(places[1] / "medusa", created=1)
    assert choose_head(HeadConfig("auto"), str(tmp_path / "outputs"), MODEL) == HeadConfig("eagle3", str(best))
    put(places[1] / "p-eagle", created=4)  # newer, and nobody knows how it drafts
    assert choose_head(HeadConfig("auto"), str(tmp_path / "outputs"), MODEL).name == "p-eagle"


@pytest.mark.parametrize("words", [["head=eagle3", "proposer=head"], ["head=auto"], ["head=eagle3", "proposer=auto"]])
def test_the_shipped_head_is_found_for_its_file_under_another_name(
    words: list[str], tiny_target_folder: Path, places: tuple[Path, Path], put: Callable[..., Path],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "Renamed.gguf"
    write_gguf(tiny_target_folder, file, (Kind.Q8_0,), tokenizer=True)
    shipped = put(places[0] / "eagle3", fingerprint(file))
    command = [f"model={file}", f"output_dir={tmp_path / 'outputs'}", *words, "proposer.adaptive=false"]
    run(with_head(compose("generate", GenerateConfig, [*command, "prompt=a b", "chat=false", "max_tokens=4"])))
    told = capsys.readouterr()
    assert f"head eagle3 from {shipped}" in told.out
    assert f"{shipped} drafts: it was trained for the same weights under another name" in told.err
    assert Engine.load(str(file), words[0].removeprefix("head="), output_dir="no").proposer_name == "head"


def test_an_export_for_the_same_weights_is_found_too(
    tiny_target_folder: Path, places: tuple[Path, Path], put: Callable[..., Path], tmp_path: Path
) -> None:
    model = ModelConfig("copied", str(tiny_target_folder))
    put(places[1].parent / "one" / "eagle3", "another")
    assert choose_head(HeadConfig("auto"), str(tmp_path / "outputs"), model) == HeadConfig("eagle3")
    found = put(places[1].parent / "two" / "mlp", fingerprint(tiny_target_folder))
    assert choose_head(HeadConfig("auto"), str(tmp_path / "outputs"), model) == HeadConfig("mlp", str(found))
    assert choose_head(HeadConfig("eagle3"), str(tmp_path / "outputs"), model) == HeadConfig("eagle3")
