"""LlamaIndex's client of OpenAI-compatible servers, and its agent."""

from __future__ import annotations

import asyncio
from typing import Literal

from checks import ARGUMENTS, ASKED, ASKED_JSON, MODEL, SAID, URL, expect, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

model = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
)
calls: list[dict[str, int]] = []


class Sum(BaseModel):
    a: int
    b: Literal[1, 2]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    calls.append({"a": a, "b": b})
    return a + b


def plain() -> None:
    expect(model.chat([ChatMessage(role="system", content="Be brief."), ChatMessage(ASKED)]).message.content, SAID)


def stream() -> None:
    expect("".join(chunk.delta or "" for chunk in model.stream_chat([ChatMessage(ASKED)])), SAID)


def tools() -> None:
    async def two_turns() -> list[str]:
        agent = FunctionAgent(tools=[add], llm=model, system_prompt="Be brief.")
        context = Context(agent)
        return [str(await agent.run(ASKED, ctx=context)) for _ in range(2)]

    expect(asyncio.run(two_turns()), [SAID] * 2)
    expect(calls, [ARGUMENTS] * 2)


def structured() -> None:
    expect(model.as_structured_llm(Sum).chat([ChatMessage(ASKED_JSON)]).raw, Sum(**ARGUMENTS))


run("llama-index-llms-openai-like", plain=plain, stream=stream, tools=tools, structured=structured)
