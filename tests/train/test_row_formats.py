"""The same rows in any file format give the same ids, and a conversation that is truncated or refused is reported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infer.options.cli import compose
from models.tokenizer import Tokenizer
from tests.chats import ANSWER, LOOK, RESULT, SYSTEM, USER, calling, with_templates
from train.config import FilesDataConfig, TrainConfig
from train.data.dialogue import provided_dialogue
from train.data.examples import drop_nulls, parse_row, parse_turns
from train.data.sources import read_items
from train.loop import train

OTHER = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "enum": ["a", "b"]},
                "who": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            },
        },
    },
}
# Struct columns of these hold nulls: `unit` beside `text`, `description`, `enum`, `required`, `tool_call_id`, `name`.
ROWS: list[dict[str, Any]] = [
    {"messages": [SYSTEM, USER, calling({"city": "Rom", "days": 2}), RESULT, ANSWER], "tools": [LOOK]},
    {"messages": [USER, calling({"text": "a"}, "Noted."), RESULT, {**ANSWER, "content": "Done."}], "tools": [OTHER]},
    {"messages": [USER, {**ANSWER, "reasoning_content": "hm"}], "tools": None},
    {"messages": [{**USER, "name": "eva"}, calling({}), RESULT, ANSWER], "tools": [LOOK, OTHER]},
]


def config(path: Path, **settings: Any) -> FilesDataConfig:
    return FilesDataConfig(name="files", path=str(path), responses="given", **settings)


def learnt(row: Any, tokenizer: Tokenizer) -> list[Any]:
    _, example = parse_row(row, config(Path("x")), tokenizer)
    return provided_dialogue(example, tokenizer, 4000).rows


@pytest.fixture
def tokenizer(tiny_tokenizer: Tokenizer) -> Tokenizer:
    return with_templates(tiny_tokenizer, "qwen3")


def write(rows: list[dict[str, Any]], folder: Path) -> dict[str, Path]:
    """Write the rows in every format that training reads and return the paths by format."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    paths = {name: folder / f"rows.{name}" for name in ("jsonl", "json", "parquet", "arrow")}
    paths["jsonl"].write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    paths["json"].write_text(json.dumps(rows), encoding="utf-8")
    pyarrow.parquet.write_table(table, paths["parquet"])
    with pyarrow.OSFile(str(paths["arrow"]), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    paths["saved"] = folder / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(str(paths["saved"]))
    return paths


def test_every_format_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    expected = [learnt(row, tokenizer) for row in ROWS]
    nulls = 0
    for name, path in write(ROWS, tmp_path).items():
        items = list(read_items(config(path), held_out=False) or ())
        assert [item.error for item in items] == [None] * len(ROWS)
        nulls += sum(json.dumps(item.row).count("null") for item in items if name == "parquet")
        assert [learnt(item.row, tokenizer) for item in items] == expected, name
    assert nulls > 20, "the table has nothing filled in"


def test_free_form_values_as_json_text(tokenizer: Tokenizer) -> None:
    """For columns of a single type: the whole list of calls, of tools or of messages may be a JSON text."""
    for row in ROWS:
        expected = learnt(row, tokenizer)
        messages = [
            {**message, "tool_calls": json.dumps(message["tool_calls"])} if "tool_calls" in message else message
            for message in row["messages"]
        ]
        arguments = [
            {**message, "tool_calls": [{**call, "function": texts(call["function"])} for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in row["messages"]
        ]
        tools = row["tools"] or []
        for variant in (
            {**row, "messages": messages},
            {**row, "messages": arguments},
            {**row, "messages": json.dumps(row["messages"])},
            {**row, "tools": json.dumps(tools)},
            {**row, "tools": [json.dumps(tool) for tool in tools]},
            {**row, "tools": [tool["function"] for tool in tools]},
        ):
            assert learnt(variant, tokenizer) == expected


def texts(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"])}


def test_sharegpt_s_calls_are_the_same_conversation(tokenizer: Tokenizer) -> None:
    call = {"name": "weather", "arguments": {"city": "Rom"}}
    expected = learnt({"messages": [USER, calling(call["arguments"]), RESULT, ANSWER], "tools": [LOOK]}, tokenizer)
    for value in (
        json.dumps(call),
        json.dumps({**call, "arguments": json.dumps(call["arguments"])}),
        json.dumps([call]),
    ):
        turns = [
            ("human", USER["content"]),
            ("function_call", value),
            ("observation", RESULT["content"]),
            ("gpt", "Fine."),
        ]
        row = {"conversations": [{"from": role, "value": text} for role, text in turns], "tools": json.dumps([LOOK])}
        assert learnt(row, tokenizer) == expected


def test_openai_s_form_of_2023_is_named_and_no_call_is_lost(tokenizer: Tokenizer) -> None:
    older = {"role": "assistant", "content": "Let me look.", "function_call": {"name": "weather", "arguments": "{}"}}
    messages, cut = parse_turns("messages", [USER, older, RESULT, ANSWER])
    assert [message["role"] for message in messages] == ["user"]
    assert cut == "function_call is OpenAI's form of 2023; write tool_calls, and the role tool for function (message 2)"


def test_calls_without_ids_for_a_template_that_asks_for_them(tiny_tokenizer: Tokenizer) -> None:
    """ShareGPT's calls have none, nor their results: each result belongs to the first call that has none yet."""
    tokenizer = with_templates(tiny_tokenizer, "mistral")
    calls = [{"name": "weather", "arguments": {"city": city}} for city in ("Rom", "Bern")]
    turns = [("human", "q"), ("function_call", json.dumps(calls)), ("observation", "1"), ("observation", "2")]
    turns += [("gpt", "Fine."), ("human", "r"), ("function_call", json.dumps(calls[0])), ("observation", "3")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns], "tools": json.dumps([LOOK])}
    text = tokenizer.decode(learnt(row, tokenizer)[-1].ids)
    ids = re.findall(r'"id": "([a-z0-9]{9})"', text)
    assert len(set(ids)) == 3
    assert re.findall(r'"call_id": "(.*?)"', text) == ids[:2]  # the row ends with the last call, an assistant's turn


def test_calls_that_cannot_be_read_are_a_bad_row(tokenizer: Tokenizer) -> None:
    for calls, complaint in (("{", "tool_calls is a text and no JSON"), ([{"id": 1}], "tool_calls must be a list of")):
        with pytest.raises(ValueError, match=rf"{complaint}.*\(message 2\)"):
            learnt({"messages": [USER, {"role": "assistant", "tool_calls": calls}, RESULT, ANSWER]}, tokenizer)
    with pytest.raises(ValueError, match="tools must be a list of functions"):
        learnt({"messages": [USER, ANSWER], "tools": [5]}, tokenizer)


def test_which_nulls_are_dropped() -> None:
    """Null fields are dropped at any depth, list elements never; a default of null stays if the schema allows null."""
    assert drop_nulls({"a": None, "b": [None, {"c": None, "d": 0}]}) == {"b": [None, {"d": 0}]}
    nullable = {"default": None, "type": ["string", "null"]}
    for schema in (nullable, {"default": None, "enum": [1, None]}, {"default": None, "nullable": True},
                   {"default": None, "oneOf": [{"type": "null"}]}):  # fmt: skip
        assert drop_nulls({"p": {**schema, "title": None}}, schema=True) == {"p": schema}
        assert list(drop_nulls(schema, schema=True)) == list(schema)
    assert drop_nulls({"p": {"type": "string", "default": None}}, schema=True) == {"p": {"type": "string"}}


LONG = {"messages": [USER, ANSWER, {"role": "user", "content": "word " * 80}, ANSWER]}
IMAGE = {"role": "user", "content": [{"type": "image", "image": "x.png"}]}
LATE = {"messages": [{"role": "user", "content": "What is a late image?"}, ANSWER, IMAGE, ANSWER]}


@pytest.mark.parametrize("responses", ["given", "regenerate"])
def test_what_is_cut_or_refused_is_named(
    responses: str, tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log, source.json and the report name file, row and reason."""
    rows = [{"messages": [{"role": "user", "content": f"{number}?"}, ANSWER]} for number in range(8)]
    broken = {"messages": [USER, {"role": "assistant", "tool_calls": "{"}, RESULT, ANSWER]}
    path = tmp_path / "rows.jsonl"
    both = {"messages": [*LONG["messages"], IMAGE], "system": "Be long."}  # too long before its image: one conversation
    path.write_text("\n".join(json.dumps(row) for row in [*rows, LONG, broken, LATE, both]), encoding="utf-8")
    settings = [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "run=one", "data=files",
        f"data.path={path}", f"data.responses={responses}", "data.max_prompt_tokens=60", "data.held_out_share=0.01",
        "sequence_length=200", "steps=1", "minutes=null", "objective.steps=2",
        "eval_draft_tokens=2", "eval_prompts=2", "eval_max_tokens=8", "tracker=none",
        "engine.max_tokens_in_cache=1024",
    ]  # fmt: skip
    settings += ["data.max_new_tokens=6"] if responses == "regenerate" else []
    result = train(compose("train", TrainConfig, settings), settings)
    assert result is not None
    short = "left out" if responses == "given" else "shortened"  # given an unusable response, no turn is left
    cut = "" if responses == "given" else "cut: "
    lines = [
        f"shortened: {path}, line 9: cut after message 3 of 4: the prompt has",
        f"{short}: {path}, line 10: {cut}tool_calls is a text and no JSON (message 2)",
        f"shortened: {path}, line 11: cut: content has parts that are no text (message 3)",
        f"shortened: {path}, line 12: cut after message 4 of 5: the prompt has",
    ]
    log = capsys.readouterr().err
    assert all(line in log for line in lines)
    shortened = 3 if responses == "given" else 4
    assert f"{shortened} were shortened" in (Path(result["export"]) / "README.md").read_text()
    named = json.loads((tmp_path / "one" / "data" / "source.json").read_text())["named"]
    assert len({line.split(": ")[0] for line in named["shortened"]}) == shortened
    assert len(named["left out"]) == 4 - shortened
    counts = json.loads((Path(result["export"]) / "provenance.json").read_text())["data_counts"]
    assert counts["shortened"] == shortened
    assert str(tmp_path / "rows") not in json.dumps(counts)
