"""Structured output over HTTP, in OpenAI's and in vLLM's fields; a hostile grammar fails its own request only."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from infer.sampling.grammar import Grammar
from infer.server.parsing.grammar_check import GrammarCheck, GrammarRefused
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
        ({"response_format": format_of({"type": "string", "pattern": "(?=a)"})}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
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
        with pytest.raises(GrammarRefused, match=r"takes more than 0\.2 s of CPU time to compile"):
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
        first = check._process.pid
        check._process.kill()  # as the kernel would
        with pytest.raises(GrammarRefused, match="more memory"):
            await check.check(Grammar("regex", "b+"))
        await check.check(Grammar("regex", "b+"))
        assert check._process.pid != first
        with pytest.raises(GrammarRefused, match="json_schema: Invalid type"):
            await check.check(Grammar("json_schema", '{"type": "wibble"}'))
        await check.close()
        await check.check(Grammar("regex", "a+"))  # cached as valid, so no process is started
        assert check._process is None

    asyncio.run(main())
