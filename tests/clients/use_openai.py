"""OpenAI's Python package: chats, completions and responses."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from checks import ARGUMENTS, ASKED, ASKED_JSON, MODEL, PARAMETERS, SAID, URL, expect, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
messages: list[Any] = [{"role": "user", "content": ASKED}]
FUNCTION: dict[str, Any] = {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}


class Sum(BaseModel):
    a: int
    b: Literal[1, 2]


def plain() -> None:
    chat = client.chat.completions.create(model=MODEL, messages=messages)
    expect((chat.choices[0].message.content, chat.choices[0].finish_reason), (SAID, "stop"))
    completion = client.completions.create(model=MODEL, prompt=f"# user: {ASKED}\n# assistant:")
    expect(completion.choices[0].text, SAID)
    expect(client.responses.create(model=MODEL, input=ASKED).output_text, SAID)
    expect([model.id for model in client.models.list()], [MODEL])


def stream() -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, stream=True))
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks), SAID)
    expect(chunks[-1].choices[0].finish_reason, "stop")
    with client.chat.completions.stream(model=MODEL, messages=messages) as events:
        expect(events.get_final_completion().choices[0].message.content, SAID)
    with client.responses.stream(model=MODEL, input=ASKED) as response:
        expect(response.get_final_response().output_text, SAID)


def tools() -> None:
    tool: Any = {"type": "function", "function": FUNCTION}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "add"}}):
        request: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [tool], "tool_choice": choice}
        message = client.chat.completions.create(**request, parallel_tool_calls=False).choices[0].message
        (call,) = message.tool_calls or ()
        expect((call.function.name, json.loads(call.function.arguments)), ("add", ARGUMENTS))
        turn = [*messages, message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        expect(
            client.chat.completions.create(model=MODEL, messages=turn, tools=[tool]).choices[0].message.content, SAID
        )
        with client.chat.completions.stream(**request, parallel_tool_calls=False) as events:
            (streamed,) = events.get_final_completion().choices[0].message.tool_calls
        expect(json.loads(streamed.function.arguments), ARGUMENTS)
    flat: Any = {"type": "function", "strict": True, **FUNCTION}
    first = client.responses.create(model=MODEL, input=ASKED, tools=[flat])
    (item,) = [item for item in first.output if item.type == "function_call"]
    expect(json.loads(item.arguments), ARGUMENTS)
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
    again = client.responses.create(model=MODEL, input=[*messages, *first.output, result], tools=[flat])
    expect(again.output_text, SAID)


def structured() -> None:
    request: list[Any] = [{"role": "user", "content": ASKED_JSON}]
    chat = client.chat.completions.parse(model=MODEL, messages=request, response_format=Sum)
    expect(chat.choices[0].message.parsed, Sum(**ARGUMENTS))
    with client.chat.completions.stream(model=MODEL, messages=request, response_format=Sum) as events:
        expect(events.get_final_completion().choices[0].message.parsed, Sum(**ARGUMENTS))
    expect(client.responses.parse(model=MODEL, input=ASKED_JSON, text_format=Sum).output_parsed, Sum(**ARGUMENTS))


run("openai", plain=plain, stream=stream, tools=tools, structured=structured)
