"""Keywords of JSON schemas that libraries write, as clients send them, and where what is not enforced is said."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import jsonschema
import pytest

from infer.json_schema.keywords import ENFORCED, IGNORED
from tests.server.harness import MODEL, Server
from tests.server.test_call_round_trip import chat_message, content_of, written_exactly
from tests.server.test_structure import MESSAGES, format_of, send_everywhere, text_of
from tests.server.test_structure import no_space as no_space

Json = dict[str, Any]


def an_object(value: Any, **more: Any) -> Json:
    return {"type": "object", "properties": {"v": value}, "required": ["v"], "additionalProperties": False, **more}


def tool(name: str, schema: Any) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def digits_first(server: Server) -> dict[str, int]:
    return {str(token): 100 for text in "0123456789." for token in server.ids(text)}


RECORD = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}
BOUNDED = [
    {"enum": ["x"], "$comment": "asks for nothing more"},
    {"type": "string", "format": "path", "maxLength": 3},
    {"type": "string", "format": "nanoid", "pattern": "^[a-c]{2}$"},
    {
        "type": "string",
        "format": "binary",
        "contentEncoding": "base64",
        "contentMediaType": "text/plain",
        "maxLength": 2,
    },
    {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": False},
    RECORD | {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"enum": [1]}},
    RECORD | {"propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": {"enum": [1]}, "maxProperties": 2},
]


def test_what_asks_for_nothing_is_no_error(server: Server, no_space: dict[str, int]) -> None:
    for schema in BOUNDED:
        response = server.complete(response_format=format_of(an_object(schema)), logit_bias=no_space, max_tokens=120)
        jsonschema.validate(json.loads(text_of(response)), an_object(schema))


def test_nor_is_it_anywhere_else(server: Server, no_space: dict[str, int]) -> None:
    names = RECORD | {"additionalProperties": {"enum": [1]}, "maxProperties": 0}
    whole = an_object({"anyOf": [{"type": "string", "format": "path", "maxLength": 2}, names]})
    for response in send_everywhere(server, whole, logit_bias=no_space, seed=3):
        jsonschema.validate(json.loads(text_of(response)), whole)


def test_a_record_in_one_tool_of_two(talking: dict[str, Server], no_space: dict[str, int]) -> None:
    """As the tools of MCP's TypeScript SDK carry it, forced in each API."""
    server = talking["hermes"]
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 3}
    tools = [tool("set", an_object(RECORD)), tool("now", an_object({"enum": [1]}))]
    responses = [
        server.post("/v1/chat/completions", chat | {"tools": tools, "tool_choice": "required"}),
        server.post(
            "/v1/responses",
            {"model": MODEL, "input": "x", "max_output_tokens": 200, "tool_choice": "required"}
            | {"tools": [{"type": "function", **item["function"]} for item in tools]},
        ),
        server.post(
            "/v1/messages",
            chat
            | {"tool_choice": {"type": "any"}}
            | {"tools": [{"name": x["function"]["name"], "input_schema": x["function"]["parameters"]} for x in tools]},
        ),
    ]
    for response in responses:
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("schema", "remark"),
    [
        ({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": True}, "uniqueItems"),
        ({"enum": [1, 2], "not": {"const": 2}}, "not"),
        ({"enum": [1, 2], "if": {"const": 1}, "then": False}, "if"),
        ({"type": "array", "maxItems": 2, "items": {"enum": [1]}, "contains": {"const": 1}}, "contains"),
        ({"enum": ["ab"], "type": "string", "pattern": "a(?=b)"}, "look-around in a pattern"),
        ({"enum": ["aa"], "type": "string", "pattern": r"(a)\1"}, "a back-reference in a pattern"),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, "maximum beyond 2^53"),
        ({"type": "string", "format": "x-remark", "maxLength": 2}, "format x-remark"),
    ],
)
def test_what_cannot_be_enforced_is_said_once(
    server: Server, no_space: dict[str, int], schema: Json, remark: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {key: value for key, value in schema.items() if key not in IGNORED and key not in ("not", "pattern")}
    server.engine._constraints._said.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            response = server.complete(response_format=format_of(an_object(schema)), logit_bias=no_space, max_tokens=60)
            jsonschema.validate(json.loads(text_of(response)), an_object(plain))  # the rest is enforced
    said = [record.getMessage() for record in caplog.records if "JSON schema: " in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"JSON schema: {remark} is ")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (an_object({"type": "strnig"}), "properties.v.type: must be one or a list of null"),
        (an_object({"type": "string", "pattern": "a("}), "properties.v.pattern: "),
        (an_object({"minLength": -1}), "properties.v.minLength: must be a count"),
        (an_object({"items": 3}), "properties.v.items: must be an object or a boolean"),
        (an_object({"$ref": "#/nowhere"}), "properties.v.$ref: '#/nowhere' is not in this schema"),
        (an_object({"const": 2**60}), "const 1152921504606846976 is beyond 2^53"),
        (an_object(False), "required property 'v' is unsatisfiable"),
    ],
)
def test_an_error_names_the_tool_and_the_keyword(talking: dict[str, Server], schema: Json, message: str) -> None:
    fine = tool("first", an_object({"type": "string", "description": "a secret of the first"}))
    for style in ("hermes", "llama3"):
        response = talking[style].post(
            "/v1/chat/completions",
            {"model": MODEL, "messages": MESSAGES, "tools": [fine, tool("second", schema)], "tool_choice": "required"},
        )
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("tools", "invalid_grammar")
        assert error["message"].startswith("tools: the parameters of second: ")
        assert message in error["message"]
        assert "first" not in error["message"]


OPEN = {"type": "object", "properties": {"a": {"enum": [2]}}, "required": ["a"]}


def test_vllm_s_options_of_structured_outputs(server: Server, no_space: dict[str, int]) -> None:
    fields: Json = {"seed": 5, "logit_bias": no_space, "max_tokens": 60}
    closed = {"json": OPEN, "disable_additional_properties": True}
    assert json.loads(text_of(server.complete(**fields, structured_outputs=closed))) == {"a": 2}
    nested = {"json": json.dumps({"$ref": "#/$defs/A", "$defs": {"A": OPEN}}), "disable_additional_properties": True}
    assert json.loads(text_of(server.complete(**fields, structured_outputs=nested))) == {"a": 2}
    spaces = {str(token): 100 for text in (" ", "\n") for token in server.ids(text)}
    compact = closed | {"disable_any_whitespace": True}
    assert text_of(server.complete(**fields | {"logit_bias": spaces}, structured_outputs=compact)) == '{"a":2}'
    for name, value in (("whitespace_pattern", "[ ]?"), ("structural_tag", "{}")):
        error = server.complete(structured_outputs={"json": OPEN, name: value}).json()["error"]
        assert error["param"] == f"structured_outputs.{name}"
    assert server.complete(structured_outputs={"json": OPEN, "whitespace_pattern": None}).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": r"\d{3}-\d{4}"}},
        {"guided_regex": r"[\d]{3}-\d{4}"},
        {"structured_outputs": {"grammar": r'start: /\d{3}/ "-" /\d{4}/'}},
        {"response_format": format_of({"type": "string", "pattern": r"^\d{3}-\d{4}$"})},
    ],
    ids=["regex", "guided_regex", "grammar", "pattern"],
)
def test_digits_are_ascii_everywhere(server: Server, fields: Json) -> None:
    """A model that prefers full-width digits writes others."""
    bias = {str(token): 100 for digit in "０１９" for token in server.ids(digit)}
    text = text_of(server.complete(**fields, logit_bias=bias, temperature=0, max_tokens=30))
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", text.strip('"'))


@pytest.mark.parametrize(
    ("format_", "pattern"),
    [
        ("date-time", r"\d{4}-\d\d-\d\d[tT]\d\d:\d\d:\d\d(\.\d{1,9})?([zZ]|[+-]\d\d:\d\d)"),
        ("time", r"\d\d:\d\d:\d\d(\.\d{1,9})?([zZ]|[+-]\d\d:\d\d)"),
        ("duration", r"P(\d{1,6}[YMWD])*(T(\d{1,6}[HMS])+)?"),
    ],
)
def test_a_time_ends(server: Server, format_: str, pattern: str) -> None:
    """A model that prefers digits to anything else; alone and beside a pattern without such a bound."""
    for schema in (
        {"type": "string", "format": format_},
        {"type": "string", "format": format_, "pattern": r"^[-\dT:PYMDHSW]*(\.\d+)?(Z|[+-]\d\d:\d\d)?$"},
    ):
        body = {"response_format": format_of(an_object(schema)), "temperature": 0, "max_tokens": 200}
        choice = server.complete(**body, logit_bias=digits_first(server)).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        text = json.loads(choice["text"])["v"]
        if "pattern" not in schema:
            assert re.fullmatch(pattern, text)
        assert re.search(r"\.\d{10}", text) is None


TUPLE = an_object({"type": "array", "items": [{"const": 1}, {"$ref": "#pair"}], "additionalItems": False})
ANCHORED = TUPLE | {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "definitions": {"P": {"$anchor": "pair", "enum": [2]}},
}


def test_a_bare_call_fits_as_a_forced_one_does(talking: dict[str, Server]) -> None:
    server, tools = talking["hermes"], [tool("set", ANCHORED)]
    call = '{"name": "set", "arguments": {"v": [1, 2]}}'
    message, reason = chat_message(server, stream=False, tools=tools, **written_exactly(server, call))
    assert (content_of(message), reason) == (("", [("set", '{"v": [1, 2]}')]), "tool_calls")
    for unfit in ("[2, 1]", "[1, 3]", "[1, 2, 3]"):
        text = call.replace("[1, 2]", unfit)
        message, _ = chat_message(server, stream=False, tools=tools, **written_exactly(server, text))
        assert content_of(message) == (text, [])
    message, _ = chat_message(server, stream=False, tools=tools, tool_choice="required", max_tokens=300)
    for _, arguments in content_of(message)[1]:
        assert json.loads(arguments)["v"] in ([], [1], [1, 2])


def test_no_keyword_is_in_two_lists() -> None:
    assert ENFORCED.keys().isdisjoint(IGNORED)
