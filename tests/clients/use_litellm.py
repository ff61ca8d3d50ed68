"""LiteLLM, as a client of OpenAI's API and of Anthropic's."""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
from checks import ARGUMENTS, ASKED, ASKED_JSON, MODEL, PARAMETERS, SAID, URL, expect, run
from pydantic import BaseModel

PROVIDERS: list[dict[str, Any]] = [
    {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"},
]
messages = [{"role": "user", "content": ASKED}]
tool = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}}


class Sum(BaseModel):
    a: int
    b: Literal[1, 2]


def plain() -> None:
    for provider in PROVIDERS:
        choice = litellm.completion(**provider, messages=messages).choices[0]
        expect((choice.message.content, choice.finish_reason), (SAID, "stop"))


def stream() -> None:
    for provider in PROVIDERS:
        chunks = list(litellm.completion(**provider, messages=messages, stream=True))
        expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks), SAID)


def tools() -> None:
    for provider in PROVIDERS:
        message = litellm.completion(**provider, messages=messages, tools=[tool]).choices[0].message
        (call,) = message.tool_calls
        expect((call.function.name, json.loads(call.function.arguments)), ("add", ARGUMENTS))
        turn = [
            *messages,
            message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "3"},
        ]
        expect(litellm.completion(**provider, messages=turn, tools=[tool]).choices[0].message.content, SAID)
        forced = {"type": "function", "function": {"name": "add"}}
        chunks = litellm.completion(**provider, messages=messages, tools=[tool], tool_choice=forced, stream=True)
        rebuilt = litellm.stream_chunk_builder(list(chunks), messages=messages)
        expect([json.loads(call.function.arguments) for call in rebuilt.choices[0].message.tool_calls], [ARGUMENTS])


def structured() -> None:
    turn = [{"role": "user", "content": ASKED_JSON}]
    for provider in PROVIDERS[:2]:
        content = litellm.completion(**provider, messages=turn, response_format=Sum).choices[0].message.content
        expect(Sum.model_validate_json(content), Sum(**ARGUMENTS))


run("litellm", plain=plain, stream=stream, tools=tools, structured=structured)
