"""Entries of data.path, which select rows and make prompts of them, and the built-in prompts."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from infer.options.cli import compose
from models.tokenizer import Tokenizer
from train.config import FilesDataConfig, TrainConfig
from train.data.builtin_prompts import builtin_items, documented
from train.data.entries import cut_text
from train.data.prompts import read_prompts
from train.data.sources import read_items

MIX = Path(__file__).parents[2] / "conf" / "data" / "mix.yaml"


def rows_of(folder: Path, *entries: Any, **more: Any) -> list[Any]:
    data = FilesDataConfig(name="files", path=list(entries), root=str(folder), **more)
    items = read_items(data, held_out=False)
    assert items is not None
    return [item.error or item.row for item in items]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(1, 41)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"question": "why?", "text": "b\n"}) + "\n")
    return tmp_path


def test_lines_and_templates(folder: Path) -> None:
    entry = {"path": "a.jsonl", "lines": [3, 5], "template": "Say {text}: {}"}
    assert rows_of(folder, entry) == [{"prompt": f"Say row {n}: {{}}"} for n in (3, 4, 5)]
    missing = {"path": "b.jsonl", "template": "{answer}"}
    assert rows_of(folder, missing) == ["the template names answer, which holds no text here; it has question, text"]


def test_a_template_keeps_what_belongs_to_the_prompt(folder: Path) -> None:
    """Unless the template names the column, under its own name or ours."""
    row = {"q": "why?", "sp": "Be brief.", "a": "so", "tools": [], "text": "other"}
    (folder / "c.jsonl").write_text(json.dumps(row))
    columns = {"system": "sp", "response": "a"}
    expected = {"prompt": "Say why?", "system": "Be brief.", "response": "so", "tools": []}
    entry = {"path": "c.jsonl", "template": "Say {q}"}
    assert rows_of(folder, entry, columns=columns) == rows_of(folder, {**entry, "columns": columns}) == [expected]
    for column in ("{sp}", "{system}"):
        (made,) = rows_of(folder, {**entry, "columns": columns, "template": f"{column} {{q}}"})
        assert made == {"prompt": "Be brief. why?", "response": "so", "tools": []}


def test_a_larger_draw_holds_the_smaller(folder: Path) -> None:
    drawn = [[row["text"] for row in rows_of(folder, {"path": "a.jsonl", "rows": n})] for n in (5, 12, 100)]
    assert [len(texts) for texts in drawn] == [5, 12, 40]
    assert set(drawn[0]) < set(drawn[1])
    assert drawn[1] == sorted(drawn[1], key=lambda text: int(text.split()[1]))
    assert drawn[0] != drawn[2][:5]  # from all over the file


def test_each_entry_has_its_own_columns_and_its_turn(folder: Path) -> None:
    renamed = {"path": "b.jsonl", "columns": {"prompt": "question"}}
    rows = rows_of(folder, {"path": "a.jsonl", "rows": 3}, renamed, interleave=True)
    assert [row.get("prompt") for row in rows] == [None, "why?", None, None]


def test_long_texts_are_cut_between_paragraphs_and_words(folder: Path) -> None:
    assert cut_text("one\n\ntwo\n\n\nthree four five\n\n" + "x" * 25, 10) == [
        "one\n\ntwo", "three four", "five", "x" * 10, "x" * 10, "x" * 5,
    ]  # fmt: skip
    (folder / "book.jsonl").write_text(json.dumps({"text": "first part\n\nsecond part"}))
    entry = {"path": "book.jsonl", "chunk": {"text": 12}, "template": "Continue: {text}"}
    assert rows_of(folder, entry) == [{"prompt": "Continue: first part"}, {"prompt": "Continue: second part"}]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rows": 3}, r"data.path=.*: must be a path, an object with a path"),
        ({"path": "a", "row": 3}, r"data.path=row: must be one of path, lines"),
        ({"path": "a", "rows": 0}, r"data.path: rows=0 of a must be a number from 1"),
        ({"path": "a", "lines": [3, 1]}, r"data.path: lines=\[3, 1\] of a must be the first and the last"),
        ({"path": "a", "chunk": 900}, r"data.path: chunk=900 of a must be a column with characters"),
        ({"path": "a", "template": "Explain"}, r"data.path: template='Explain' of a must be a text with a"),
        ({"path": "a", "columns": {"question": "prompt"}}, r"data.path=question: must be one of input_ids"),
    ],
)
def test_entries_that_cannot_be_meant(entry: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FilesDataConfig(name="files", path=[entry])


def test_the_mix_takes_no_test_split() -> None:
    paths = [entry["path"] for entry in compose("train", TrainConfig, ["data=mix"]).data.path]  # type: ignore[attr-defined]
    assert not [path for path in paths if any(word in path.lower() for word in ("test", "humaneval", "arena", "dev."))]
    assert "lines: [601, 974]" in MIX.read_text()  # MBPP's tasks 11 to 510 are its test split


def test_built_in_prompts_of_every_kind_on_both_sides() -> None:
    sides = [[item.row["prompt"] for item in islice(builtin_items(held_out=side), 80)] for side in (False, True)]
    for prompts in sides:
        kinds = Counter(prompt.split(" ")[0] for prompt in prompts)
        assert kinds["Explain"] >= 40
        assert sum(prompt.startswith("Write a Python function") for prompt in prompts) >= 15
    assert not set(sides[0]) & set(sides[1])


def test_functions_with_a_docstring() -> None:
    text = 'class A:\n    def f(self, x):\n        """Adds."""\n        return x\n\ndef g(y=1):\n    """Takes."""\n'
    (explain_g, write_g), (explain_f, write_f) = documented(text)
    assert 'def f(self, x):\n    """Adds."""\n    return x' in explain_f
    assert 'def g(y=1):\n    """Takes."""' in explain_g
    assert "`g(y=1)`" in write_g
    assert write_f == "", "of a method"
    assert list(documented("no python at all")) == []


def test_other_models_than_the_demo_are_asked_through_their_template(tiny_tokenizer: Tokenizer) -> None:
    """By default train/run.py model=... trains on `chat` data, unless the model is the demo."""
    assert compose("train", TrainConfig, ["model=demo"]).data.name == "demo"
    assert compose("train", TrainConfig, ["model=owner/name"]).data.name == "chat"
    config = compose("train", TrainConfig, ["model=llama3-8b", "data.num_sequences=12", "eval_prompts=4"])
    prompts = read_prompts(config, tiny_tokenizer, 512)
    assert (len(prompts.train), len(prompts.held_out)) == (12, 4)
    assert all(example.messages[0]["role"] == "user" for example in prompts.train.values())
    for example in prompts.held_out.values():
        text = tiny_tokenizer.decode(list(example.ids))
        assert text.startswith("# user: ")
        assert text.endswith("# assistant:")
