"""Structured output over HTTP, in OpenAI's and in vLLM's fields; a hostile grammar fails its own request only."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from infer.batch.grammar import Grammar
from infer.server.parsing.grammar_check import GrammarCheck
from models.json_text import depth
from tests.server import patient
from tests.server.harness import MODEL, Server
from tests.server.test_wire import read_events

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 5}, "kind": {"enum": ["noun", "verb"]}},
    "required": ["word", "kind"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [{"role": "user", "content": "a word"}]


@pytest.fixture(scope="module")
def no_space(server: Server) -> dict[str, int]:
    """Return a bias against white space, with which a random model would fill its output."""
    return {str(token): -100 for form in (" ", "\n", "\t", "\r", "  ", "    ") for token in server.ids(form)}


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.3, "seed": 3}])
def test_a_schema_is_kept_and_drafts_change_nothing(
    server: Server, no_space: dict[str, int], sampling: dict[str, Any]
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 80, "logit_bias": no_space, **sampling}
    body["response_format"] = format_of(SCHEMA)
    on = server.post("/v1/chat/completions", body).json()
    off = server.post("/v1/chat/completions", body | {"speculative": {"enabled": False}}).json()
    (choice,) = on["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert off["choices"] == on["choices"]
    assert on["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    events = read_events(server.post("/v1/chat/completions", body | {"stream": True}).text)
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert streamed == choice["message"]["content"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Kind", "$defs": {"Kind": {"enum": ["noun", "verb"]}}},
        {"type": "array", "items": {"$ref": "#/definitions/K"}, "maxItems": 1, "definitions": {"K": {"enum": [1, 2]}}},
        {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        {"anyOf": [{"enum": [1, 2]}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 1}]},
    ],
    ids=["$defs", "definitions", "properties", "root"],
)
def test_references_in_every_field_that_takes_a_schema(
    server: Server, no_space: dict[str, int], schema: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "seed": 2, "logit_bias": no_space}
    texts = [
        server.complete(**fields, max_tokens=80, structured_outputs={"json": schema}).json()["choices"][0]["text"],
        server.post(
            "/v1/chat/completions",
            {**fields, "max_tokens": 80, "messages": MESSAGES, "response_format": format_of(schema)},
        ).json()["choices"][0]["message"]["content"],
        server.post(
            "/v1/responses",
            fields
            | {"max_output_tokens": 80, "input": "a word"}
            | {"text": {"format": {"type": "json_schema", "name": "answer", "schema": schema}}},
        ).json()["output"][0]["content"][0]["text"],
    ]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", '"\\ud83d"', '{"\\ud83d": 1}', "[" * 2000 + "]" * 2000])
def test_a_schema_that_no_answer_could_hold_is_a_400(talking: dict[str, Server], value: str) -> None:
    """JSON as Python reads it, which allows more. The response of /v1/responses repeats the schemas of its request."""
    schema, server = f'{{"type": "object", "default": {value}}}', talking["hermes"]
    chat = '"messages": [{"role": "user", "content": "x"}], "max_tokens": 2'
    function = f'{{"name": "x", "parameters": {schema}}}'
    responses = '"input": "x", "max_output_tokens": 2'
    for path, body in (
        ("completions", f'"prompt": "x", "structured_outputs": {{"json": {schema}}}'),
        (
            "chat/completions",
            f'{chat}, "response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}',
        ),
        ("chat/completions", f'{chat}, "tools": [{{"type": "function", "function": {function}}}]'),
        ("responses", f'{responses}, "tools": [{{"type": "function", "name": "x", "parameters": {schema}}}]'),
        ("responses", f'{responses}, "text": {{"format": {{"type": "json_schema", "name": "x", "schema": {schema}}}}}'),
    ):
        response = patient.post(
            f"{server.url}/v1/{path}",
            content=f'{{"model": "{MODEL}", {body}}}',
            headers={"content-type": "application/json"},
            timeout=600,
        )
        assert response.status_code == 400, response.text


def test_several_answers_each_keep_it(server: Server, no_space: dict[str, int]) -> None:
    response = server.complete(
        prompt=["a", "b"], n=2, max_tokens=80, seed=1, logit_bias=no_space, response_format=format_of(SCHEMA)
    ).json()
    assert len(response["choices"]) == 4
    for choice in response["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


@pytest.mark.parametrize(
    ("structured_outputs", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'start: "(" /[xyz]{1,3}/ ")"'}, r"\([xyz]{1,3}\)"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
        ({"json": '{"type": "boolean"}'}, "true|false"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1, 2]}}}}, "1|2"),
    ],
)
def test_vllm_s_ways_of_asking(server: Server, structured_outputs: dict[str, Any], pattern: str) -> None:
    choice = server.complete(max_tokens=40, structured_outputs=structured_outputs).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["text"].strip())


def test_any_json_object(server: Server, no_space: dict[str, int]) -> None:
    body: dict[str, Any] = {"max_tokens": 120, "temperature": 0, "logit_bias": no_space}
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        choice = server.complete(**body, **fields).json()["choices"][0]
        assert choice["text"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


def test_openai_s_client_parses_a_model(client: openai.OpenAI, no_space: dict[str, int]) -> None:
    class Word(pydantic.BaseModel):
        length: int = pydantic.Field(ge=0, le=99)
        good: bool

    completion = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Word, max_tokens=80, logit_bias=no_space
    )
    assert isinstance(completion.choices[0].message.parsed, Word)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": format_of({"type": "wibble"})}, "response_format"),
        ({"response_format": format_of({"$ref": "https://example.org/schema"})}, "response_format"),
        ({"response_format": format_of({"$ref": "#/nowhere"})}, "response_format"),
        ({"response_format": format_of({"type": "string", "pattern": "("})}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 200_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "false"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.json_schema"),
        ({"response_format": format_of(SCHEMA) | {"schema": SCHEMA}}, "response_format.json_schema"),
        ({"response_format": format_of({"$ref": "#"})}, "response_format"),
        ({"guided_json": {}, "guided_regex": "("}, "structured_outputs"),
        ({"guided_json": {"type": "wibble"}}, "structured_outputs"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_a_bad_grammar_is_a_400(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.complete(max_tokens=5, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_deep_schema_is_a_400(server: Server) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    assert depth(schema) == 41
    error = server.complete(response_format=format_of(schema)).json()["error"]
    assert error["code"] == "grammar_too_large"


def test_a_grammar_that_compiles_for_too_long_is_given_up(server: Server) -> None:
    """The server stays usable, and compiles the next grammar."""
    good = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9}
    assert server.complete(**good).status_code == 200
    slow = server.complete(structured_outputs={"regex": "(a{1000}){1000}"})
    assert (slow.status_code, slow.json()["error"]["code"]) == (400, "invalid_grammar")
    assert server.complete(structured_outputs={"choice": ["on", "off"]}, max_tokens=9).status_code == 200


def test_the_cpu_time_of_a_grammar_is_limited(tiny_tokenizer: Any) -> None:
    settings = {"tokenizer": tiny_tokenizer.backend.to_str(), "vocab_size": 384, "eos_ids": [0]}

    async def main() -> None:
        check = GrammarCheck(settings, cpu_s=0.2)
        with pytest.raises(ValueError, match=r"takes more than 0\.2 s of CPU time to compile"):
            await check.check(Grammar("regex", "(a{1000}){1000}"))
        await check.check(Grammar("regex", "a+"))
        await check.close()

    asyncio.run(main())


def test_a_process_that_bursts_or_hangs_is_replaced(tiny_tokenizer: Any) -> None:
    settings = {"tokenizer": tiny_tokenizer.backend.to_str(), "vocab_size": 384, "eos_ids": [0]}

    async def main() -> None:
        check = GrammarCheck(settings)
        await check.check(Grammar("regex", "a+"))
        assert check._process is not None
        for number in (signal.SIGKILL, signal.SIGTERM):  # from outside: the next grammar did nothing wrong
            killed = check._process.pid
            os.kill(killed, number)
            await check.check(Grammar("json_schema", f'{{"const": {number.value}}}'))
            assert check._process.pid != killed
        with pytest.raises(ValueError, match="json_schema: type: must be one or a list of"):
            await check.check(Grammar("json_schema", '{"type": "wibble"}'))
        await check.close()
        await check.check(Grammar("regex", "a+"))  # cached as valid, so no process is started
        assert check._process is None

    asyncio.run(main())


def send_everywhere(server: Server, schema: Any, **fields: Any) -> list[Any]:
    """Send a schema in each field that takes one, at each endpoint. Returns the responses."""
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 120, **fields}
    forms = [
        format_of(schema),
        {"type": "json_object", "schema": schema},  # llama.cpp's
        {"type": "json_schema", "schema": schema, "name": "x", "strict": True},
    ]
    return [
        *(server.complete(**fields, max_tokens=120, response_format=form) for form in forms),
        *(server.post("/v1/chat/completions", chat | {"response_format": form}) for form in forms),
        server.complete(**fields, max_tokens=120, structured_outputs={"json": json.dumps(schema)}),
        server.complete(**fields, max_tokens=120, guided_json=schema),
        *(
            server.post(
                "/v1/responses",
                {"model": MODEL, "input": "x", "max_output_tokens": 120, "text": {"format": form}, **fields},
            )
            for form in forms[1:]
        ),
        server.post("/v1/messages", chat | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
    ]


def text_of(response: Any) -> str:
    assert response.status_code == 200, response.text
    body = response.json()
    if "choices" in body:
        return body["choices"][0].get("text") or body["choices"][0]["message"]["content"]
    blocks = body["content"] if "content" in body else body["output"][0]["content"]
    return blocks[0]["text"]


def test_the_schema_is_kept_wherever_it_stands(server: Server, no_space: dict[str, int]) -> None:
    for response in send_everywhere(server, SCHEMA, logit_bias=no_space, seed=1):
        jsonschema.validate(json.loads(text_of(response)), SCHEMA)
    anything = {"type": "json_object", "schema": {}}  # asks for nothing more
    assert server.complete(response_format=anything, logit_bias=no_space).json()["choices"][0]["text"][0] == "{"


BIG = 9007199254740993  # 2^53 + 1


@pytest.mark.parametrize(
    ("schema", "number"),
    [
        ({"const": BIG}, BIG),
        ({"const": -BIG}, -BIG),
        ({"enum": [1, {"id": [BIG]}]}, BIG),
        ({"type": "integer", "minimum": BIG}, BIG),
        ({"type": "integer", "exclusiveMaximum": -BIG}, -BIG),
        ({"type": "array", "items": {"anyOf": [{"type": "null"}, {"minimum": 2**63 - 1}]}}, 2**63 - 1),
        ({"type": "object", "properties": {"minimum": {"enum": [2**64 - 1]}}}, 2**64 - 1),
        ({"$ref": "#/$defs/const", "$defs": {"const": {"const": 10**30 + 1}}}, 10**30 + 1),
        ({"type": "integer", "maximum": -(2**63)}, -(2**63)),
        ({"type": "integer", "exclusiveMinimum": 2**53}, 2**53),
        ({"type": "number", "minimum": 1e20}, 1e20),
    ],
)
def test_a_number_that_would_become_its_neighbour_is_a_400(server: Server, schema: Any, number: float) -> None:
    for response in send_everywhere(server, schema):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert f"{number} is beyond 2^53" in error["message"]


def test_schemas_inside_a_client_s_grammar(server: Server) -> None:
    lark = f'start: "<" %json {{"enum": [1, {BIG}]}} ">"'
    error = server.complete(structured_outputs={"grammar": lark}).json()["error"]
    assert f"enum {BIG} is beyond 2^53" in error["message"]
    text = server.complete(structured_outputs={"grammar": lark.replace(str(BIG), "7")}).json()["choices"][0]["text"]
    assert text in ("<1>", "<7>")


def test_numbers_that_nothing_is_compared_with_are_not_looked_at(server: Server, no_space: dict[str, int]) -> None:
    schema = {
        "type": "object",
        "properties": {"const": {"enum": [2**53, -(2**53), 7], "default": BIG, "examples": [BIG]}},
        "required": ["const"],
        "additionalProperties": False,
        "description": "ids",
        "default": {"const": BIG},
    }
    for response in send_everywhere(server, schema, logit_bias=no_space, seed=5):
        jsonschema.validate(json.loads(text_of(response)), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_a_schema_without_an_answer_is_refused_in_words(server: Server, schema: Any) -> None:
    for response in send_everywhere(server, schema):
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert "nothing can satisfy it" in message
        assert not {"NoExtensionBias", "<non-verbose/>"} & set(message.split())


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("bounds", [{}, {"minimum": 0}, {"exclusiveMinimum": 0, "maximum": 1}])
def test_a_number_ends(server: Server, kind: str, bounds: dict[str, Any]) -> None:
    """A model that prefers digits to anything else writes at most 40, and the longest token more."""
    digits = {str(token): 100 for text in "0123456789" for token in server.ids(text)}
    schema = {"type": "object", "properties": {"n": {"type": kind, **bounds}}, "required": ["n"]}
    schema["additionalProperties"] = False
    if kind == "integer" and "maximum" in bounds:
        schema["properties"]["n"]["maximum"] = 9
    drafted = {"logit_bias": digits, "temperature": 0, "max_tokens": 120, "response_format": format_of(schema)}
    on, off = (server.complete(**drafted, speculative={"enabled": drafts}).json() for drafts in (True, False))
    assert on["choices"] == off["choices"]
    texts = [on["choices"][0]["text"]]
    if kind == "number" and not bounds:
        texts += map(text_of, send_everywhere(server, schema, logit_bias=digits, temperature=0))
    for text in texts:
        assert re.fullmatch(r"\{\s*\"n\"\s*:\s*\S{1,50}\s*\}", text), text
        jsonschema.validate(json.loads(text), schema)
    if kind == "number" or not bounds:
        assert len(on["choices"][0]["text"]) > 40


def test_digits_in_a_string_are_not_counted(server: Server) -> None:
    digits = {str(token): 100 for text in "0123456789" for token in server.ids(text)}
    schema = {"type": "object", "properties": {"n": {"type": "string", "pattern": "^[0-9]{50,60}$"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    fields: dict[str, Any] = {"logit_bias": digits, "temperature": 0, "max_tokens": 120}
    text = server.complete(**fields, response_format=format_of(schema)).json()["choices"][0]["text"]
    assert len(json.loads(text)["n"]) == 60
    regex = server.complete(**fields, structured_outputs={"regex": "[0-9]{70}"}).json()["choices"][0]["text"]
    assert len(regex) == 70


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 50}])
def test_the_grammar_decides_where_an_answer_ends(server: Server, fields: dict[str, Any]) -> None:
    for grammar in ({"choice": ["yes", "no"]}, {"regex": "[ab]{1,4}"}):
        body = {"structured_outputs": grammar, "max_tokens": 60, "temperature": 0}
        plain = server.complete(**body).json()["choices"]
        assert server.complete(**body, **fields).json()["choices"] == plain
        assert plain[0]["finish_reason"] == "stop"
