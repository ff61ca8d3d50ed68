"""An answer that is nothing but a call without its marks is a call, in every endpoint, streamed and not."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.server.parsing.schema_check import fits
from infer.server.parsing.stream import ChatParser, Parts
from infer.server.parsing.tool_styles import STYLES, Call
from tests.server.harness import MODEL, Server, named_events
from tests.server.talking import ASKED
from tests.server.test_call_round_trip import (
    chat_message,
    content_of,
    content_of_items,
    response_items,
    send_back,
    written_exactly,
)
from tests.server.test_tools import ADD, NOW, PARAMETERS

CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
SUM = ("add", '{"a": 1, "b": 2}')
# text -> its calls
CALLS: dict[str, list[tuple[str, str]]] = {
    CALL: [SUM],
    f" \n{CALL}\n\n": [SUM],
    f"```json\n{CALL}\n```": [SUM],
    f"```\n{CALL}\n```\n": [SUM],
    f"```json\n{CALL}": [SUM],
    '{"arguments": {"a": 1, "b": 2}, "name": "add"}': [SUM],
    '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}': [SUM],
    '{\n  "name": "add",\n  "arguments": {\n    "a": 99\n  }\n}': [("add", '{\n    "a": 99\n  }')],
    '{"name": "now", "arguments": {}}': [("now", "{}")],
    f'[{CALL}, {{"name": "now", "arguments": {{}}}}]': [SUM, ("now", "{}")],
    f'{CALL}\n{{"name": "now", "arguments": {{}}}}': [SUM, ("now", "{}")],
}
NO_CALLS = (
    '{"name": "rm", "arguments": {"a": 1}}',
    '{"name": "add", "arguments": {"a": 100}}',
    '{"name": "add", "arguments": {"a": "1"}}',
    '{"name": "add", "arguments": {"b": 1}}',
    '{"name": "add", "arguments": {"a": 1, "c": 1}}',
    '{"name": "add", "arguments": {"a": 1, "b": 3}}',
    '{"name": "add", "arguments": [1]}',
    '{"name": "add", "arguments": {"a": NaN}}',
    '{"name": "add"}',
    '{"name": "now", "id": "x"}',
    '{"name": "now", "arguments": {}, "why": "it is late"}',
    '{"answer": 3, "name": "add", "arguments": {"a": 1}}',
    f"Here it is: {CALL}",
    f"{CALL} is the call.",
    f"```json\n{CALL}\n```\nThis adds.",
    f"```python\n{CALL}\n```",
    f"[{CALL}, 3]",
    f"[{CALL}, " + '{"name": "rm", "arguments": {}}]',
    CALL[:-1],
    f"```json\n{CALL[:20]}",
    "{",
    "```",
    "[]",
    "[1]",
    "",
)
TOOLS = {"add": PARAMETERS, "now": NOW["function"]["parameters"]}


def parser(style: str = "hermes", **options: Any) -> ChatParser:
    def check(call: Call) -> bool:
        return fits(json.loads(call.arguments), TOOLS[call.name])

    return ChatParser(STYLES[style], list(TOOLS), fits=check, **options)


def parse(style: str, chunks: list[str], **options: Any) -> Parts:
    reader, parts = parser(style, **options), Parts()
    for chunk in chunks:
        parts.items += reader.take(chunk, None).items
    parts.items += reader.take("", "stop").items
    return parts


def pieces(text: str, cuts: list[int]) -> list[str]:
    positions = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(positions)]


def pairs(calls: list[Call]) -> list[tuple[str, str]]:
    assert all(call.complete for call in calls)
    return [(call.name, call.arguments) for call in calls]


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=40))
@pytest.mark.parametrize("style", ["hermes", "mistral"])
@pytest.mark.parametrize("text", [*CALLS, *NO_CALLS])
def test_what_is_a_call_and_what_content_however_it_comes(style: str, text: str, cuts: list[int]) -> None:
    calls, content = CALLS.get(text, []), "" if text in CALLS else text
    parts = parse(style, pieces(text, cuts))
    assert (pairs(parts.calls), parts.content) == (calls, content)
    first = parse(style, pieces(text, cuts), max_calls=1)
    assert (pairs(first.calls), first.content) == (calls[:1], content)
    thought = parse(style, pieces(f"Hm.</think>\n\n{text}", cuts), thinking=True, inside=True)
    assert (thought.reasoning, thought.content, pairs(thought.calls)) == ("Hm.", content, calls)


def test_a_marked_call_after_other_json_is_still_one() -> None:
    text = f'{{"name": "rm", "arguments": {{}}}}\n<tool_call>\n{CALL}\n</tool_call>'
    for chunks in ([text], list(text)):
        parts = parse("hermes", chunks)
        assert (pairs(parts.calls), parts.content) == ([SUM], '{"name": "rm", "arguments": {}}\n')


def test_llama_s_calls_are_bare_anyway_and_may_be_fenced() -> None:
    assert pairs(parse("llama3", [f"```json\n{CALL}\n```"]).calls) == [SUM]
    assert parse("llama3", list(f"[{CALL}]")).calls == [Call(*SUM)]


@pytest.mark.parametrize("text", [CALL, f"```json\n{CALL}\n```"])
def test_a_cut_one_is_a_call_once_it_is_complete(text: str) -> None:
    complete = text.index("}}") + 2
    for end in range(len(text) + 1):
        parts = parser().take(text[:end], "length")
        if end < complete:
            assert (parts.calls, parts.content) == ([], text[:end])
        else:
            assert (pairs(parts.calls), parts.content) == ([SUM], "")


def test_text_that_cannot_become_a_call_is_not_held_back() -> None:
    """JSON and code that an answer begins with are streamed."""
    for text in ('{"answer": 1', "```python\nx", "[1, 2", '{"names"', f"{CALL} so"):
        reader, shown = parser(), ""
        for character in text:
            shown += reader.take(character, None).content
        assert shown.strip(), text


@pytest.mark.parametrize("text", [*list(CALLS)[:3], f"[{CALL}]"])
def test_over_http(talking: dict[str, Server], text: str) -> None:
    server = talking["hermes"]
    fields = written_exactly(server, text)
    message, reason = chat_message(server, stream=False, **fields)
    streamed, streamed_reason = chat_message(server, stream=True, **fields)
    assert (content_of(message), reason) == (content_of(streamed), streamed_reason) == (("", [SUM]), "tool_calls")
    for stream in (False, True):
        items = response_items(server, stream=stream, **fields)
        assert content_of_items(items) == ("", [SUM])
        send_back(server, message, items)
    tool = {"name": "add", "input_schema": PARAMETERS}
    body = {"model": MODEL, "messages": [{"role": "user", "content": ASKED}], "max_tokens": 80, "tools": [tool]}
    whole = server.post("/v1/messages", body | fields).json()
    assert [(block["type"], block["input"]) for block in whole["content"]] == [("tool_use", {"a": 1, "b": 2})]
    assert whole["stop_reason"] == "tool_use"
    events = named_events(server.post("/v1/messages", body | fields | {"stream": True}).text)
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["tool_use"]


def test_where_it_stays_content_over_http(talking: dict[str, Server]) -> None:
    """Without tools, with `none`, for a tool that is not allowed, where the arguments do not fit, in a JSON format."""
    server = talking["hermes"]
    fields = written_exactly(server, CALL)
    strict = {"type": "function", "function": {"name": "add", "parameters": {"required": ["x"]}}}
    only_now = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}}
    for options in (
        {"tools": None},
        {"tool_choice": "none"},
        {"tools": [strict]},
        {"tools": [ADD, NOW], "tool_choice": only_now},
    ):
        message, reason = chat_message(server, stream=False, **fields, **options)
        assert (content_of(message), reason) == ((CALL, []), "stop")
    schema = {
        "type": "object",
        "properties": {"name": {"const": "add"}, "arguments": {"const": {"a": 1}}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    for style in ("hermes", "llama3"):
        form = {"type": "json_object", "schema": schema}
        message, reason = chat_message(talking[style], stream=False, response_format=form)
        content, calls = content_of(message)
        assert (json.loads(content)["name"], calls, reason) == ("add", [], "stop")


@pytest.mark.parametrize(
    ("schema", "fitting", "unfit"),
    [
        ({}, [1, None, {"a": []}], []),
        (True, [1], []),
        (False, [], [1]),
        ({"type": "integer"}, [1, -2, 2.0], [1.5, "1", True, None]),
        ({"type": ["number", "null"]}, [1.5, 2, None], ["1", False]),
        ({"enum": [1, "a", None]}, [1, "a", None], [True, 2, "b"]),
        ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
        ({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.9, "text"], [0, 3]),
        ({"minLength": 1, "maxLength": 2}, ["a", "ab", 5], ["", "abc"]),
        ({"items": {"type": "string"}, "minItems": 1}, [["a"]], [[], [1]]),
        ({"prefixItems": [{"const": 1}], "items": False}, [[1], []], [[2], [1, 2]]),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, ["a", 3], [2]),
        ({"oneOf": [{"const": 1}, {"const": 2}], "allOf": [{"minimum": 2}]}, [2], [1, 3]),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"a": 1}], [{"a": "b"}]),
        ({"$ref": "#/$defs/a~1b%20~0", "$defs": {"a/b ~": {"const": 1}}}, [1], [2]),
        (
            {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
            [{"next": {"next": {}}}],
            [{"next": {"x": 1}}],
        ),
        ({"allOf": [{"required": ["a"]}, {"$ref": "#/allOf/0"}]}, [{"a": 1}], [{}]),
        ({"items": [{"const": 1}], "additionalItems": {"const": 2}}, [[], [1], [1, 2, 2]], [[2], [1, 1]]),
        ({"items": [{"const": 1}, {"const": 2}]}, [[1, 2, "x"]], [[2]]),
        ({"items": {"const": 1}, "additionalItems": False}, [[1, 1]], [[2]]),
        ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 1}}}, [1], [2]),
        ({"$dynamicRef": "#here", "$defs": {"a": {"$dynamicAnchor": "here", "const": 1}}}, [1], [2]),
        ({"items": {"$recursiveRef": "#"}, "type": "array"}, [[[]]], [[1]]),
        (
            {"$id": "https://example.org/s", "$ref": "t#/$defs/u", "$defs": {"t": {"$id": "t", "$defs": {"u": False}}}},
            [],
            [1],
        ),
        ({"$id": "https://example.org/s", "$ref": "t", "$defs": {"t": {"$id": "/t", "const": 1}}}, [1], [2]),
        ({"$ref": "#/components/a", "components": {"a": {"const": 1}}}, [1], [2]),
        (
            {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"const": 1}},
            [{}, {"a": 1}],
            [{"b": 1}, {"a": 2}],
        ),
        ({"propertyNames": False}, [{}], [{"a": 1}]),
        ({"not": {}}, [], [1]),
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}],
                "unevaluatedProperties": False,
                "$defs": {"a": {"properties": {"a": {}}}},
            },
            [{"a": 1}],
            [{"b": 1}],
        ),
        ({"minimum": 5, "exclusiveMinimum": True}, [6], [5]),
        ({"exclusiveMinimum": 1, "uniqueItems": True, "default": {"$ref": "#/nowhere"}}, [2, [1, 1]], [1]),
        # malformed, foreign or endless: nothing fits
        ({"type": "wibble"}, [], [1]),
        ({"properties": []}, [], [{"a": 1}]),
        ({"$ref": "https://example.org/s"}, [], [1]),
        ({"$ref": "#/nowhere"}, [], [1]),
        ({"$ref": "#"}, [], [1]),
        ({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, [], [1]),
    ],
)
def test_what_fits_a_schema(schema: Any, fitting: list[Any], unfit: list[Any]) -> None:
    assert [value for value in fitting if not fits(value, schema)] == []
    assert [value for value in unfit if fits(value, schema)] == []


def test_a_check_that_explodes_is_given_up() -> None:
    levels = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(40)}
    assert not fits(1, {"$ref": "#/$defs/l0", "$defs": levels | {"l40": {}}})
