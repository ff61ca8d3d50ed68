"""From rows to both sides of the split: every row is counted, bad ones are shown with their place, none stops a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from infer.options.cli import compose
from models.tokenizer import Tokenizer
from train.config import FilesDataConfig, TrainConfig
from train.data.prompts import Prompts, Reader, name_of, read_prompts


def prompts_of(count: int, first: int = 0) -> list[str]:
    return [json.dumps({"prompt": f"def f{number}(x):"}) for number in range(first, first + count)]


def read(
    tmp_path: Path,
    lines: list[str],
    tokenizer: Tokenizer,
    *,
    eval_prompts: int = 16,
    longest: int = 50,
    **settings: Any,
) -> Prompts:
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    data = FilesDataConfig(name="files", path=str(tmp_path / "data.jsonl"), **settings)
    return Reader(data, tokenizer, longest, eval_prompts).read()


def test_files_of_one_name_are_told_apart() -> None:
    paths = ["/sets/gsm8k/train.jsonl.xz", "/sets/mbpp/tasks.jsonl", "/sets/sgd/train.jsonl.xz"]
    named = name_of(FilesDataConfig(name="files", path=paths))
    assert named == "gsm8k/train.jsonl.xz, tasks.jsonl, sgd/train.jsonl.xz"


def test_bad_rows_are_left_out_counted_and_shown(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    lines = [*prompts_of(20), "", "oops", *["{}"] * 10, json.dumps({"prompt": "long " * 60}), *prompts_of(5)]
    prompts = read(tmp_path, lines, tiny_tokenizer, held_out_share=0.3)
    reading = prompts.reading
    assert (reading.read, len(prompts.train) + len(prompts.held_out)) == (37, 20)
    assert reading.dropped["bad"] == 11
    assert reading.dropped["too long"] == 1
    assert reading.dropped["twins"] + reading.dropped["held out already"] == 5
    text = reading.lines()
    assert text[0].startswith(
        f"37 rows read (26 prompt): {len(prompts.train)} to train on, {len(prompts.held_out)} held out"
    )
    assert text[1] == f"left out: {tmp_path}/data.jsonl, line 22: not JSON (Expecting value at column 1)"
    assert text[-1] == "left out: 4 more"
    assert len(text) == 10


def test_a_row_nested_too_deep_is_a_bad_row(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    deep = ("[" * depth + "]" * depth for depth in (800, 9000))
    rows = [f'{{"messages": [{{"role": "user", "content": "x", "meta": {value}}}]}}' for value in deep]
    reading = read(tmp_path, [*prompts_of(3), *rows], tiny_tokenizer).reading
    assert reading.dropped["bad"] == 2
    assert all("maximum recursion depth exceeded" in complaint for complaint in reading.complaints)


def test_the_split_is_by_content(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    """Neither order nor further rows move a prompt to the other side, and rows with the same prompt stay together."""
    first = read(tmp_path, prompts_of(60), tiny_tokenizer, held_out_share=0.2, eval_prompts=60)
    turned = read(tmp_path, prompts_of(60)[::-1], tiny_tokenizer, held_out_share=0.2, eval_prompts=60)
    more = read(tmp_path, prompts_of(90), tiny_tokenizer, held_out_share=0.2, eval_prompts=60)
    assert 5 <= len(first.held_out) <= 20
    assert turned.held_out == first.held_out
    assert turned.train == first.train
    assert first.held_out.keys() <= more.held_out.keys()
    assert not more.train.keys() & more.held_out.keys()
    responses = [json.dumps({"prompt": "def f1(x):", "response": f"{n}"}) for n in range(3)]
    twins = read(tmp_path, [*prompts_of(9, first=20), *responses, responses[0]], tiny_tokenizer, responses="regenerate")
    assert twins.reading.dropped.total() == 3


def test_answers_that_are_learnt_are_rows_of_their_own(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    rows = [json.dumps({"prompt": f"f{n % 4}", "response": f"def g{n}(x)"}) for n in range(12)]
    split = read(tmp_path, [*rows, rows[0]], tiny_tokenizer, responses="given", held_out_share=0.001)
    assert (len(split.train), len(split.held_out), split.reading.dropped.total()) == (9, 1, 3)


def test_texts_that_begin_alike_are_on_both_sides(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    texts = [json.dumps({"text": f"def f{n}(x): return x + {n}"}) for n in range(60)]
    prompts = read(tmp_path, texts, tiny_tokenizer, responses="given", held_out_share=0.3, prompt_tokens=8)
    assert len(prompts.train) > 20
    assert len(prompts.held_out) > 5
    assert {len(example.ids) for example in prompts.held_out.values()} == {8}
    assert not {example.opening_key for example in prompts.train.values()} & prompts.held_out.keys()


@pytest.mark.parametrize("responses", ["regenerate", "given"])
def test_conversations_that_open_alike_are_on_one_side(
    responses: str, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    """Acceptance is measured on the first prompt, so that later turns do not distinguish conversations."""

    def row(opening: int, after: int) -> str:
        turns = [("user", f"f{opening}?"), ("assistant", "so it is"), ("user", f"g{after}?"), ("assistant", "it is so")]
        return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})

    rows = [row(opening, after) for opening in range(20) for after in range(3)]
    prompts = read(tmp_path, [*rows, rows[0]], tiny_tokenizer, responses=responses, held_out_share=0.3)
    openings = {example.messages[0]["content"] for example in prompts.train.values()}
    assert not {example.opening_key for example in prompts.train.values()} & prompts.held_out.keys()
    assert len(openings) + len(prompts.held_out) == 20
    assert len(prompts.train) == 3 * len(openings)  # nor does a common opening make them duplicates


def test_reading_stops_when_both_sides_are_full(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    prompts = read(tmp_path, prompts_of(400), tiny_tokenizer, num_sequences=5, eval_prompts=2, held_out_share=0.2)
    assert (len(prompts.train), len(prompts.held_out)) == (5, 2)
    assert prompts.reading.read < 60


def test_a_held_out_side_of_ones_own(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    (tmp_path / "held.jsonl").write_text("\n".join([*prompts_of(1), "bad", *prompts_of(1, first=50)]))
    prompts = read(tmp_path, prompts_of(4), tiny_tokenizer, held_out_path=str(tmp_path / "held.jsonl"))
    assert (len(prompts.train), len(prompts.held_out)) == (3, 2)
    assert prompts.reading.dropped == {"bad": 1, "held out already": 1}
    assert "held.jsonl, line 2" in prompts.reading.complaints[0]


def test_files_that_cannot_serve(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    cause = r"^data.path=\S+: \S+, line 1: prompt must be a text; no usable prompt among 4 .* \(left out: 4 bad\)$"
    with pytest.raises(ValueError, match=cause):
        read(tmp_path, ['{"prompt": 1}'] * 4, tiny_tokenizer)
    cause = r"^data.path=\S+: 1 usable prompt among 4 rows, .* \(left out: 2 twins, 1 bad\); \S+, line 4: must hold"
    with pytest.raises(ValueError, match=cause):
        read(tmp_path, [*prompts_of(1) * 3, "{}"], tiny_tokenizer)
    (tmp_path / "held.jsonl").write_text("oops\n")
    with pytest.raises(ValueError, match=r"held.jsonl, line 1: not JSON .*; no usable row to hold out among 1 row"):
        read(tmp_path, prompts_of(2), tiny_tokenizer, held_out_path=str(tmp_path / "held.jsonl"))


def test_demo_prompts(tiny_tokenizer: Tokenizer) -> None:
    config = compose("train", TrainConfig, ["data.num_sequences=4", "data.prompt_tokens=9", "eval_prompts=3"])
    prompts = read_prompts(config, tiny_tokenizer, 512)
    assert [len(example.ids) for example in prompts.train.values()] == [9] * 4
    assert [len(example.ids) for example in prompts.held_out.values()] == [9] * 3
    assert prompts == read_prompts(config, tiny_tokenizer, 512)
    assert prompts.train != read_prompts(dataclasses.replace(config, seed=1), tiny_tokenizer, 512).train
    with pytest.raises(ValueError, match=r"data.prompt_tokens=9: leaves no room in a context of 11"):
        read_prompts(config, tiny_tokenizer, 11)
