"""Pydantic AI's agents, over chats, responses and messages."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from checks import ARGUMENTS, ASKED, ASKED_JSON, MODEL, SAID, URL, expect, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
models = [
    OpenAIChatModel(MODEL, provider=provider),
    OpenAIResponsesModel(MODEL, provider=provider),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
]


class Sum(BaseModel):
    a: Annotated[int, Field(ge=0, le=99)]
    b: Literal[1, 2]


def plain() -> None:
    for model in models:
        expect(Agent(model, instructions="Be brief.").run_sync(ASKED).output, SAID)


def stream() -> None:
    async def texts() -> list[str]:
        written = []
        for model in models:
            async with Agent(model).run_stream(ASKED) as result:
                written.append("".join([piece async for piece in result.stream_text(delta=True)]))
        return written

    expect(asyncio.run(texts()), [SAID] * len(models))


def tools() -> None:
    calls = []

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        calls.append({"a": a, "b": b})
        return a + b

    for model in models:
        agent = Agent(model, tools=[add])
        first = agent.run_sync(ASKED)
        expect(first.output, SAID)
        expect(agent.run_sync(ASKED, message_history=first.all_messages()).output, SAID)
    expect(calls, [ARGUMENTS] * 2 * len(models))


def structured() -> None:
    for output in (Sum, ToolOutput(Sum, name="add"), NativeOutput(Sum), PromptedOutput(Sum)):
        result = Agent(models[0], output_type=output).run_sync(ASKED_JSON).output
        assert isinstance(result, Sum), result
        if output is not Sum:  # the tool of Sum has a name that the target was not trained on
            expect(result, Sum(**ARGUMENTS))
    for model in models[1:]:
        expect(Agent(model, output_type=ToolOutput(Sum, name="add")).run_sync(ASKED_JSON).output, Sum(**ARGUMENTS))


run("pydantic-ai-slim", plain=plain, stream=stream, tools=tools, structured=structured)
