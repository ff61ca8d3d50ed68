"""Rows from files of every format and from `datasets`, each with its place; what cannot be read is named."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from infer.settings.paths import REPO_ROOT
from train.config import FilesDataConfig, HubDataConfig
from train.data.sources import Item, place_of, read_items

ROWS = [{"prompt": f"say {number}"} for number in range(3)]
LINES = "\n".join(json.dumps(row) for row in ROWS).encode()


def read(path: Any, **more: Any) -> list[Item]:
    items = read_items(FilesDataConfig(name="files", path=path, **more), held_out=False)
    assert items is not None
    return list(items)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same rows in every format."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "a.jsonl.xz").write_bytes(lzma.compress(LINES))
    (folder / "a.json").write_text(json.dumps(ROWS))
    (folder / "wrapped.json").write_text(json.dumps({"version": 1, "rows": ROWS}))
    (folder / "lines.json").write_bytes(LINES)
    (folder / "a.csv").write_text("prompt\n" + "".join(f"{row['prompt']}\n" for row in ROWS))
    (folder / "a.csv.gz").write_bytes(gzip.compress((folder / "a.csv").read_bytes()))
    table = Dataset.from_list(ROWS)
    table.to_parquet(str(folder / "a.parquet"))
    table.save_to_disk(str(folder / "saved"))
    (folder / "a.arrow").write_bytes(next((folder / "saved").glob("*.arrow")).read_bytes())
    return folder


FORMATS = (
    "a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.json", "wrapped.json", "lines.json", "a.csv", "a.csv.gz", "a.parquet",
    "a.arrow", "saved",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_the_same(name: str, folder: Path) -> None:
    items = read(str(folder / name))
    assert [item.row for item in items] == ROWS
    unit = "line" if "jsonl" in name or name == "lines.json" else "row"
    assert [item.place for item in items] == [f"{folder / name}, {unit} {number}" for number in (1, 2, 3)]


def test_files_in_turn(tmp_path: Path) -> None:
    """One row of each file in turn, until all have ended."""
    for name, count in (("a", 1), ("b", 3), ("c", 2)):
        rows = [{"prompt": f"{name}{number}"} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = {turn: [item.row["prompt"] for item in read(str(tmp_path), interleave=turn)] for turn in (False, True)}
    assert prompts[False] == ["a0", "b0", "b1", "b2", "c0", "c1"]
    assert prompts[True] == ["a0", "b0", "c0", "b1", "c1", "b2"]


def test_folders_patterns_and_lists(folder: Path, tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.json", "notes.md"):
        (tmp_path / name).write_bytes(LINES)
    assert len(read(str(tmp_path))) == 6
    assert len(read(f"{tmp_path}/o*.jsonl")) == 3
    assert len(read([str(tmp_path / "one.jsonl"), str(folder / "a.parquet")])) == 6


def test_a_bad_line_is_one_row_and_the_file_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n\n{oops\n\xff\xfe\n{"prompt": "b"}\n')
    items = read(str(tmp_path / "a.jsonl"))
    assert [(item.place.split(" ")[-1], item.error is None) for item in items] == [
        ("1", True), ("3", False), ("4", False), ("5", True),
    ]  # fmt: skip
    assert items[1].error == "not JSON (Expecting property name enclosed in double quotes at column 2)"


def test_what_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.path=.*none\.jsonl: no such file, and no folder or pattern"):
        read(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"gsm8k/test.jsonl; gsm8k is published at https://github.com/openai/grade-"):
        read("gsm8k/test.jsonl")
    (tmp_path / "a.xlsx").write_text("a,b")
    with pytest.raises(ValueError, match=r"data\.path=.*a\.xlsx: unknown format; give \.jsonl"):
        read(str(tmp_path / "a.xlsx"))
    (tmp_path / "torn.csv").write_text("prompt\na\nb,c\n")
    with pytest.raises(ValueError, match=r"torn\.csv: cannot be read \(.*Expected 1 fields in line 3, saw 2"):
        read(str(tmp_path / "torn.csv"))
    (tmp_path / "torn.parquet").write_bytes((folder / "a.parquet").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"torn\.parquet: cannot be read \("):
        read(str(tmp_path / "torn.parquet"))
    (tmp_path / "torn.jsonl.gz").write_bytes((folder / "a.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"torn\.jsonl\.gz: cannot be read \("):
        read(str(tmp_path / "torn.jsonl.gz"))
    (tmp_path / "broken.json").write_text('[{"prompt": "a"},\n{"prompt"')
    with pytest.raises(ValueError, match=r"broken\.json: not JSON \(.* at line 2, column"):
        read(str(tmp_path / "broken.json"))


def test_a_table_without_rows_is_empty(folder: Path, tmp_path: Path) -> None:
    """One of several files may be, as a shard that a filter left."""
    Dataset.from_dict({"prompt": []}).to_parquet(str(tmp_path / "a.parquet"))
    assert read(str(tmp_path / "a.parquet")) == []
    assert [item.row for item in read([str(tmp_path), str(folder / "a.parquet")])] == ROWS


def test_a_cell_is_a_text(tmp_path: Path) -> None:
    """Whatever it looks like: a number, a missing value; an empty one too. Quotes hold commas and lines together."""
    (tmp_path / "a.csv").write_text('prompt,response\n007,NA\n"one,\ntwo",\n')
    assert [item.row for item in read(str(tmp_path / "a.csv"))] == [
        {"prompt": "007", "response": "NA"},
        {"prompt": "one,\ntwo", "response": ""},
    ]


def test_a_file_that_vanishes_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    items = read_items(
        FilesDataConfig(name="files", path=[str(folder / "a.jsonl"), str(tmp_path / "a.jsonl")]), held_out=False
    )
    assert items is not None
    next(items)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl: cannot be read \(No such file"):
        list(items)


def test_of_two_files_of_one_name_the_place_tells_which(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_bytes(LINES)
    items = read(str(tmp_path))
    assert items[0].place == f"{tmp_path}/a/rows.jsonl, line 1"
    assert items[-1].place.startswith(f"{tmp_path}/b/rows.jsonl, line ")
    assert place_of(REPO_ROOT / "data" / "mine.jsonl") == "data/mine.jsonl"  # as written in data.path=


def test_a_data_set_that_breaks_off_is_named_with_the_place(tmp_path: Path) -> None:
    for number in range(2):
        rows = Dataset.from_list([{"prompt": f"{number} {row}"} for row in range(3)])
        rows.to_parquet(str(tmp_path / f"train-{number}.parquet"))
    items = read_items(HubDataConfig(name="hub", path=str(tmp_path)), held_out=False)
    assert items is not None
    (tmp_path / "train-1.parquet").write_bytes(b"<html>busy</html>")
    with pytest.raises(ValueError, match=r"data\.path=.*: split 'train' breaks off after row 3 \(.*\)\. Run the same"):
        list(items)


def test_a_data_set_through_the_library(folder: Path, tmp_path: Path) -> None:
    for split, name in (("train", "train.parquet"), ("test", "test.parquet")):
        Dataset.from_list([{"prompt": f"{split} {number}"} for number in range(2)]).to_parquet(str(tmp_path / name))
    data = HubDataConfig(name="hub", path=str(tmp_path), held_out_split="test")
    sides = [read_items(data, held_out=held_out) for held_out in (False, True)]
    assert [[item.row["prompt"] for item in side or []] for side in sides] == [
        ["train 0", "train 1"],
        ["test 0", "test 1"],
    ]
    assert read_items(HubDataConfig(name="hub", path=str(tmp_path)), held_out=True) is None
    with pytest.raises(ValueError, match=r"split 'dev' of it cannot be read"):
        read_items(HubDataConfig(name="hub", path=str(tmp_path), split="dev"), held_out=False)
    with pytest.raises(ValueError, match=r"data\.path=nobody/nothing: .*Check the spelling"):
        read_items(HubDataConfig(name="hub", path="nobody/nothing"), held_out=False)
