"""Where data come from: rows of a JSON Lines file, what is refused and how it is said, and the demo corpus."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from infer.cli import compose
from models.tokenizer import Tokenizer
from train.config import JsonlDataConfig, TrainConfig
from train.prompts import Row, parse_row, read_jsonl_prompts, read_prompts

GOOD = [
    {"prompt": "def f(x):"},
    {"messages": [{"role": "user", "content": "hi"}], "id": 3},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "dropped"}]},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
]


def test_the_three_forms(tiny_tokenizer: Tokenizer) -> None:
    rows = [parse_row(json.dumps(row), tiny_tokenizer, 100) for row in GOOD]
    assert rows[0] == Row(tiny_tokenizer.encode("def f(x):"))
    assert tiny_tokenizer.decode(rows[1].ids) == "# user: hi\n# assistant:"
    assert rows[2] == rows[1]  # the target writes its own answer
    assert rows[3] == Row([5, 6, 7, 8], [False, False, True, True])
    assert rows[3].prompt == [5, 6]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        ("[1]", "must hold exactly one of prompt, messages, input_ids; it holds none"),
        ('{"text": "a"}', "must hold exactly one of prompt, messages, input_ids; it holds none"),
        (
            '{"prompt": "a", "messages": []}',
            "must hold exactly one of prompt, messages, input_ids; it holds prompt and",
        ),
        ('{"prompt": 5}', "prompt must be a text"),
        ('{"prompt": ""}', "the prompt has 0 tokens; 1 to 20 are possible"),
        (json.dumps({"prompt": "xyz " * 40}), "the prompt has"),
        ('{"messages": "hi"}', "messages must be a list of"),
        ('{"messages": [{"content": "a"}]}', "messages must be a list of"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "messages hold no turn to answer"),
        ('{"input_ids": [1, 999999], "loss_mask": [0, 1]}', "input_ids must be a list of token ids below 384"),
        ('{"input_ids": [1, 2.5], "loss_mask": [0, 1]}', "input_ids must be a list of token ids below 384"),
        ('{"input_ids": [1, 2, 3]}', "loss_mask must be a list of 0 and 1, as long as input_ids"),
        ('{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}', "loss_mask must be a list of 0 and 1, as long as input_ids"),
        ('{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}', "loss_mask leaves nothing to learn"),
    ],
)
def test_bad_rows_say_what_is_wrong(row: str, complaint: str, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # compared below
        parse_row(row, tiny_tokenizer, 20)
    assert str(error.value).startswith(complaint)


def data(tmp_path: Path, lines: list[str], **settings: Any) -> JsonlDataConfig:
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    return JsonlDataConfig(name="jsonl", path=str(tmp_path / "data.jsonl"), **settings)


def prompts_of(count: int) -> list[str]:
    return [json.dumps({"prompt": f"def f{index}(x):"}) for index in range(count)]


def test_bad_rows_are_left_out_and_named_by_line(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    lines = [*prompts_of(3), "", "oops", *prompts_of(6)[3:], '{"prompt": 1}']
    found = read_jsonl_prompts(data(tmp_path, lines, held_out_share=0.2), tiny_tokenizer, 50, 16)
    assert len(found.train) + len(found.held_out) == 6
    assert [complaint.split(": ", 1)[0].split(", ")[1] for complaint in found.complaints] == ["line 5", "line 9"]
    assert found.complaints[1].endswith("prompt must be a text")


def test_the_split_is_by_content(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    lines = prompts_of(40)
    first = read_jsonl_prompts(data(tmp_path, lines, held_out_share=0.1), tiny_tokenizer, 50, 16)
    turned = read_jsonl_prompts(data(tmp_path, lines[::-1], held_out_share=0.1), tiny_tokenizer, 50, 16)
    assert len(first.held_out) == 4
    assert sorted(first.held_out) == sorted(turned.held_out)
    assert [row for row in first.train if row in first.held_out] == []


def test_limits(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    found = read_jsonl_prompts(data(tmp_path, prompts_of(40), num_sequences=5), tiny_tokenizer, 50, 1)
    assert (len(found.train), len(found.held_out)) == (5, 1)


def test_a_held_out_file_of_ones_own(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "class A:"}) + "\nbad\n")
    config = data(tmp_path, prompts_of(2), held_out_path=str(tmp_path / "held.jsonl"))
    found = read_jsonl_prompts(config, tiny_tokenizer, 50, 16)
    assert (len(found.train), found.held_out) == (2, [Row(tiny_tokenizer.encode("class A:"))])
    assert len(found.complaints) == 1
    assert "held.jsonl, line 2" in found.complaints[0]


def test_files_that_cannot_serve(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    missing = JsonlDataConfig(name="jsonl", path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"data.path=.*none.jsonl: cannot be read \(No such file or directory\)"):
        read_jsonl_prompts(missing, tiny_tokenizer, 50, 16)
    with pytest.raises(ValueError, match=r"no usable row; .*line 1: prompt must be a text"):
        read_jsonl_prompts(data(tmp_path, ['{"prompt": 1}']), tiny_tokenizer, 50, 16)
    with pytest.raises(ValueError, match="no usable row: the file is empty"):
        read_jsonl_prompts(data(tmp_path, [""]), tiny_tokenizer, 50, 16)
    with pytest.raises(ValueError, match="too few different rows to hold one out"):
        read_jsonl_prompts(data(tmp_path, prompts_of(1) * 3), tiny_tokenizer, 50, 16)


def test_demo_prompts(tiny_tokenizer: Tokenizer) -> None:
    config = compose("train", TrainConfig, ["data.num_sequences=4", "data.prompt_tokens=9", "eval_prompts=3"])
    found = read_prompts(config, tiny_tokenizer, 512)
    assert [len(row.ids) for row in found.train] == [9] * 4
    assert [len(row.ids) for row in found.held_out] == [9] * 3
    assert found == read_prompts(config, tiny_tokenizer, 512)
    assert found.train != read_prompts(dataclasses.replace(config, seed=1), tiny_tokenizer, 512).train
    with pytest.raises(ValueError, match=r"data.prompt_tokens=9: leaves no room in a context of 11"):
        read_prompts(config, tiny_tokenizer, 11)
