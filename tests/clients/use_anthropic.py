"""Anthropic's Python package, over /v1/messages."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
from checks import ARGUMENTS, ASKED, ASKED_JSON, MODEL, PARAMETERS, SAID, URL, expect, run
from pydantic import BaseModel

bodies: list[Any] = []
hooks: Any = {"request": [lambda request: bodies.append(json.loads(request.content or "null"))]}
http = anthropic.DefaultHttpxClient(event_hooks=hooks)
client = anthropic.Anthropic(base_url=URL, api_key="none", http_client=http)
messages: list[Any] = [{"role": "user", "content": ASKED}]
tool: Any = {"name": "add", "description": "Adds two numbers.", "input_schema": PARAMETERS}
request: dict[str, Any] = {"model": MODEL, "max_tokens": 1024}


class Sum(BaseModel):
    a: int
    b: Literal[1, 2]


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def plain() -> None:
    message = client.messages.create(**request, messages=messages, system="Be brief.")
    expect([block.text for block in message.content], [SAID])
    expect(message.stop_reason, "end_turn")
    counted = client.messages.count_tokens(model=MODEL, messages=messages)
    expect(counted.input_tokens, message.usage.input_tokens + message.usage.cache_read_input_tokens)


def stream() -> None:
    with client.messages.stream(**request, messages=messages) as events:
        expect("".join(events.text_stream), SAID)
        expect(events.get_final_message().stop_reason, "end_turn")


def tools() -> None:
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "add"}):
        choice["disable_parallel_tool_use"] = True
        first = client.messages.create(**request, messages=messages, tools=[tool], tool_choice=choice)
        (call,) = [block for block in first.content if block.type == "tool_use"]
        expect((call.name, call.input, first.stop_reason), ("add", ARGUMENTS, "tool_use"))
        with client.messages.stream(**request, messages=messages, tools=[tool], tool_choice=choice) as events:
            expect([block.input for block in events.get_final_message().content], [ARGUMENTS])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        turn = [*messages, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        expect([b.text for b in client.messages.create(**request, messages=turn, tools=[tool]).content], [SAID])
    runner = client.beta.messages.tool_runner(**request, messages=messages, tools=[add])
    expect([block.text for block in runner.until_done().content], [SAID])
    expect([turn["role"] for turn in bodies[-1]["messages"]], ["user", "assistant", "user"])


def structured() -> None:
    turn: list[Any] = [{"role": "user", "content": ASKED_JSON}]
    expect(client.messages.parse(**request, messages=turn, output_format=Sum).parsed_output, Sum(**ARGUMENTS))


run("anthropic", plain=plain, stream=stream, tools=tools, structured=structured)
