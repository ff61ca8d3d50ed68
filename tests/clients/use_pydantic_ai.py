"""Pydantic AI's agents."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from checks import ARGUMENTS, ASKED, ASKED_JSON, MODEL, SAID, URL, expect, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


class Sum(BaseModel):
    a: Annotated[int, Field(ge=0, le=99)]
    b: Literal[1, 2]


def plain() -> None:
    expect(Agent(model, instructions="Be brief.").run_sync(ASKED).output, SAID)


def stream() -> None:
    async def text() -> str:
        async with Agent(model).run_stream(ASKED) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    expect(asyncio.run(text()), SAID)


def tools() -> None:
    agent, calls = Agent(model), []

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        calls.append({"a": a, "b": b})
        return a + b

    expect(agent.run_sync(ASKED).output, SAID)
    expect(calls, [ARGUMENTS])


def structured() -> None:
    for output in (Sum, ToolOutput(Sum, name="add"), NativeOutput(Sum), PromptedOutput(Sum)):
        result = Agent(model, output_type=output).run_sync(ASKED_JSON).output
        assert isinstance(result, Sum), result
        if output is not Sum:  # the tool of Sum has a name that the target was not trained on
            expect(result, Sum(**ARGUMENTS))


run("pydantic-ai-slim", plain=plain, stream=stream, tools=tools, structured=structured)
