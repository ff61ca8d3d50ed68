"""Random walks through the grammar of a forced call: a model that samples at random writes valid calls too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import pydantic
import pytest

from infer.server.parsing.call_grammar import call_grammar
from infer.server.parsing.harmony import HarmonyParser
from infer.server.parsing.stream import ChatParser
from infer.server.parsing.tool_styles import MAX_FORCED_CALLS, STYLES, Call
from infer.server.protocol.chat import ChatRequest
from infer.server.protocol.tools import FunctionTool, ToolUse

Json = dict[str, Any]


class Point(pydantic.BaseModel):
    x: int
    y: int


class Kind(pydantic.BaseModel):
    kind: bool


class Shape(pydantic.BaseModel):
    name: Kind
    points: list[Point] = pydantic.Field(max_length=2)


class Tree(pydantic.BaseModel):
    left: Tree | None
    leaf: bool


INTEGER: Json = {"type": "integer", "minimum": 0, "maximum": 99}


def an_object(properties: Json, definitions: Json | None = None, **extra: Any) -> Json:
    closed = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return closed | ({} if definitions is None else {"$defs": definitions}) | extra


OTHER_POINT = an_object({"lat": INTEGER})
ID: Json = {"$id": "https://example.org/s"}
# Schemas of a tool's parameters, with references of every kind.
SCHEMAS: dict[str, Any] = {
    "pydantic": Shape.model_json_schema(),
    "recursive": Tree.model_json_schema(),
    "another_Point": an_object({"p": {"$ref": "#/$defs/Point"}}, {"Point": OTHER_POINT}),
    "definitions": an_object({"p": {"$ref": "#/definitions/Point"}}) | {"definitions": {"Point": OTHER_POINT}},
    "root": {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    "a_neighbour": an_object({"a": INTEGER, "b": {"$ref": "#/properties/a"}}),
    "escaped": an_object({"a/b ~": INTEGER, "b": {"$ref": "#/properties/a~1b%20~0"}}),
    "id": an_object({"p": {"$ref": "https://example.org/s#/$defs/P"}}, {"P": INTEGER}, **ID),
    "anchor": an_object({"p": {"$ref": "#here"}}, {"P": {"$anchor": "here"} | INTEGER}),
    "relative": an_object({"p": {"$ref": "p"}}, {"P": {"$id": "p"} | INTEGER}, **ID),
    "named_root": {"$ref": "#/$defs/P", "$defs": {"P": OTHER_POINT}},
    "optional": {"anyOf": [OTHER_POINT, {"type": "null"}]},
    "nullable": OTHER_POINT | {"type": ["object", "null"]},
    "boolean_member": an_object({"a": INTEGER, "b": INTEGER}) | {"patternProperties": {"^z$": True}},
    "no_type": {"properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": False},
    "none": None,
    "empty": an_object({}),
    'quoted"': an_object({'say "\\ é': {"enum": ['"\\', "é"]}}),
}


def tool(name: str) -> FunctionTool:
    return FunctionTool(name=name.strip('"'), parameters=SCHEMAS[name])


def schema_of(name: str) -> Any:
    return {"type": "object", "maxProperties": 0} if SCHEMAS[name] is None else SCHEMAS[name]


def forced(style: str, tools: list[FunctionTool], max_calls: int | None) -> Any:
    return call_grammar(STYLES[style], tools, most=max_calls or MAX_FORCED_CALLS, tokens={})


def calls_of(style: str, text: str, names: list[str], *, cut: bool = False) -> list[Call]:
    parser = ChatParser(
        STYLES[style], names, forced=True, schemas={name.strip('"'): SCHEMAS.get(name) for name in SCHEMAS}
    )
    if style == "harmony":
        parser = HarmonyParser(names, forced=True)
    parts = parser.take(text, "length" if cut else "stop")
    assert parts.content == ""
    return parts.calls


@pytest.mark.parametrize("style", STYLES)
def test_arguments_keep_the_tool_s_own_schema(walk: Callable[..., tuple[str, bool]], style: str) -> None:
    """Holds for each tool alone and for all in one request: tools with different definitions of `Point` do not mix."""
    tools = [tool(name) for name in SCHEMAS]
    names = {function.name: name for function, name in zip(tools, SCHEMAS, strict=True)}
    complete: set[str] = set()
    for name in SCHEMAS:
        for seed in range(4):
            text, ended = walk(forced(style, [tool(name)], 1), seed)
            calls = calls_of(style, text, list(names), cut=not ended)
            assert len(calls) == 1
            for call in calls:
                assert call.complete >= ended
                assert names[call.name] == name
                if call.complete:
                    jsonschema.validate(json.loads(call.arguments), schema_of(name))
                    complete.add(name)
    assert complete == set(SCHEMAS)
    for seed in range(12):
        text, ended = walk(forced(style, tools, None), seed)
        calls = calls_of(style, text, list(names), cut=not ended)
        assert 1 <= len(calls) <= MAX_FORCED_CALLS
        for call in calls:
            if call.complete:
                jsonschema.validate(json.loads(call.arguments), schema_of(names[call.name]))


def choice(**fields: Any) -> ToolUse:
    functions = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMAS["empty"]}} for name in ("a", "b")
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": functions}
    return ChatRequest.model_validate(body | fields).tool_use


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, {1}),
        ({"tool_choice": {"type": "function", "function": {"name": "a"}}, "parallel_tool_calls": True}, {1}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {1}),
        ({"tool_choice": "required"}, set(range(1, MAX_FORCED_CALLS + 1))),
    ],
    ids=["named", "named, parallel", "required, one", "required"],
)
def test_how_many_calls_there_are(
    walk: Callable[..., tuple[str, bool]], style: str, fields: Json, counts: set[int]
) -> None:
    request = choice(**fields)
    numbers, called = set(), set()
    for seed in range(40):
        text, ended = walk(forced(style, request.allowed, request.max_calls), seed)
        assert ended
        calls = calls_of(style, text, ["a", "b"])
        numbers.add(len(calls))
        called |= {call.name for call in calls}
    assert numbers <= counts
    assert (
        max(numbers) == 1 if counts == {1} or style == "harmony" else len(numbers) > 2
    )  # there a call ends the answer
    assert called == ({"a"} if "function" in str(fields) else {"a", "b"})


def test_only_objects_can_be_arguments() -> None:
    for parameters in ({"type": "string"}, {"type": ["array", "null"]}, False):
        with pytest.raises(ValueError, match="parameters of f must be a schema of type object"):
            _ = FunctionTool(name="f", parameters=parameters).arguments_schema
    assert FunctionTool(name="f", parameters=True).arguments_schema == {"type": "object"}


def test_marks_that_are_tokens_are_forced_as_tokens() -> None:
    ids = {"<tool_call>": 7, "</tool_call>": 8}
    grammar = call_grammar(STYLES["hermes"], [tool("none")], most=2, tokens=ids)
    assert 'call_0: <[7]> "\\n{\\"name\\": \\"none\\", \\"arguments\\": " arguments_0 "}\\n" <[8]>' in grammar.text
    assert llguidance.LLMatcher.grammar_from_lark(grammar.text)
