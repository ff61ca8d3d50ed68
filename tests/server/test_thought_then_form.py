"""A prompt that opens a reasoning span: what a form or a forced call binds is the answer behind it, not the thought."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.conftest import VOCAB_SIZE, MakeTarget
from tests.server.harness import MODEL, MakeServer, Server
from tests.server.talking import ASKED, style_folder
from tests.server.test_wire import read_events
from tests.vocabularies import MOST_ADDED, write_family

THOUGHT = "\n1 and 2 is 3\n"  # has been learnt; the template ends with the mark before it
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": ASKED}], "temperature": 0}


@pytest.fixture(scope="module")
def thinker(
    talking_target: Path, make_server: MakeServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A model whose marks of reasoning are ordinary text."""
    folder = style_folder(talking_target, "think", tmp_path_factory.mktemp("opened"))
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8").replace("{% if tools %}", "{% if false %}")
    (folder / "chat_template.jinja").write_text(f"{template}<think>", encoding="utf-8")
    with make_server(target=folder, proposer="ngram", tool_parser="hermes") as server:
        yield server


def message_of(server: Server, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Return reasoning, content, calls and finish reason of a chat, whole or as its pieces add up."""
    response = server.post("/v1/chat/completions", BODY | fields)
    assert response.status_code == 200, response.text
    choices = [
        event["choices"][0] for event in (read_events(response.text) if fields.get("stream") else [response.json()])
    ]
    parts = [choice["delta" if fields.get("stream") else "message"] for choice in choices]
    reasoning, content = ("".join(part.get(name) or "" for part in parts) for name in ("reasoning_content", "content"))
    calls = [call["function"] for part in parts for call in part.get("tool_calls", [])]
    return reasoning, content, [(call["name"], call["arguments"]) for call in calls], choices[-1]["finish_reason"]


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"speculative": {"enabled": False}}], ids=str)
def test_a_form_binds_what_follows_the_thought(thinker: Server, options: dict[str, Any]) -> None:
    forms: list[dict[str, Any]] = [{"response_format": FORM}, {"response_format": {"type": "json_object"}}]
    forms += [{"structured_outputs": form} for form in ({"choice": ["yes", "no"]}, {"regex": "(yes|no)!"})]
    forms += [{"structured_outputs": {"grammar": 'start: "yes" | "no"'}}]
    for form in forms:
        reasoning, content, calls, reason = message_of(thinker, **form, **options, max_tokens=80)
        assert (reasoning, calls) == (THOUGHT, [])
        if "response_format" not in form:
            assert content.rstrip("!") in ("yes", "no")
        elif form["response_format"] is FORM:
            jsonschema.validate(json.loads(content), SCHEMA)
            assert reason == "stop"
        else:
            assert content.startswith("{")


@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=str)
def test_the_thought_is_free_and_the_call_forced(thinker: Server, options: dict[str, Any]) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 120, **options}
        reasoning, content, ((name, arguments),), reason = message_of(thinker, **fields)
        assert (reasoning, content, name, reason) == (THOUGHT, "", "add", "tool_calls")
        jsonschema.validate(json.loads(arguments), SCHEMA)


def test_a_thought_that_is_cut_is_reasoning(thinker: Server) -> None:
    for stream in (False, True):
        reasoning, content, _, reason = message_of(thinker, response_format=FORM, max_tokens=5, stream=stream)
        assert (content, reason) == ("", "length")
        assert THOUGHT.startswith(reasoning)
        assert reasoning


def test_other_endpoints(thinker: Server) -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    body = {"model": MODEL, "input": ASKED, "temperature": 0, "text": text, "max_output_tokens": 80}
    thought, answer = thinker.post("/v1/responses", body).json()["output"]
    assert thought["content"][0]["text"] == THOUGHT
    jsonschema.validate(json.loads(answer["content"][0]["text"]), SCHEMA)
    tool = {"name": "add", "input_schema": SCHEMA}
    body = {**BODY, "max_tokens": 120, "tools": [tool], "tool_choice": {"type": "any"}}
    blocks = thinker.post("/v1/messages", body).json()["content"]
    assert [block["type"] for block in blocks][-1] == "tool_use"
    jsonschema.validate(blocks[-1]["input"], SCHEMA)


def test_marks_that_are_tokens(make_target_folder: MakeTarget, make_server: MakeServer, tmp_path: Path) -> None:
    """The mark is one token, and the numbers behind it end."""
    source = make_target_folder(seed=5, num_hidden_layers=2, vocab_size=VOCAB_SIZE + MOST_ADDED)
    folder = write_family("qwen3", tmp_path, source=source)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ tools }}<think>\n", encoding="utf-8")
    schema = {**SCHEMA, "properties": {"n": {"type": "integer"}}}
    with make_server(target=folder, proposer="ngram") as server:
        (end,), digits = server.ids("</think>"), [token for text in "0123456789" for token in server.ids(text)]
        fields: dict[str, Any] = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            "logit_bias": {**{str(token): 60 for token in digits}, str(end): 59.9},
            "max_tokens": 300,
        }
        for stream in (False, True):
            reasoning, content, _, reason = message_of(server, stream=stream, **fields)
            assert set(reasoning) <= set("0123456789")
            assert reason == "stop"
            assert 1 <= len(str(json.loads(content)["n"])) <= 50
