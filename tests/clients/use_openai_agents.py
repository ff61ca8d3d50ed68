"""OpenAI's Agents SDK, over responses (its default) and chats."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import ARGUMENTS, ASKED, ASKED_JSON, MODEL, SAID, URL, expect, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
models = [kind(MODEL, client) for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel)]
calls: list[dict[str, int]] = []
loop = asyncio.new_event_loop()  # one for all, to which the client's connections belong


class Sum(BaseModel):
    a: int
    b: Literal[1, 2]


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    calls.append({"a": a, "b": b})
    return a + b


def agents(**options: Any) -> list[Agent]:
    settings = ModelSettings(store=False)
    return [Agent("a", instructions="Be brief.", model=model, model_settings=settings, **options) for model in models]


def plain() -> None:
    for agent in agents():
        expect(loop.run_until_complete(Runner.run(agent, ASKED)).final_output, SAID)


def stream() -> None:
    async def text(agent: Agent) -> str:
        result = Runner.run_streamed(agent, ASKED)
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    for agent in agents():
        expect(loop.run_until_complete(text(agent)), SAID)


def tools() -> None:
    for agent in agents(tools=[add]):
        first = loop.run_until_complete(Runner.run(agent, ASKED))
        expect(first.final_output, SAID)
        turn: Any = [*first.to_input_list(), {"role": "user", "content": ASKED}]
        expect(loop.run_until_complete(Runner.run(agent, turn)).final_output, SAID)
    expect(calls, [ARGUMENTS] * 4)


def structured() -> None:
    for agent in agents(output_type=Sum):
        expect(loop.run_until_complete(Runner.run(agent, ASKED_JSON)).final_output, Sum(**ARGUMENTS))


run("openai-agents", plain=plain, stream=stream, tools=tools, structured=structured)
