"""LangChain's agents, with ChatOpenAI (chats and responses) and ChatAnthropic."""

from __future__ import annotations

from typing import Literal

from checks import ARGUMENTS, ASKED, ASKED_JSON, MODEL, SAID, URL, expect, run
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none")
models = [
    model,
    ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", use_responses_api=True),
    ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_tokens=1024),
]


class Sum(BaseModel):
    """A sum. Its tool is named after it, with a name that the target has not learnt."""

    a: int
    b: Literal[1, 2]


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def plain() -> None:
    message = model.invoke(ASKED)
    expect((message.content, message.response_metadata["finish_reason"]), (SAID, "stop"))
    expect(model.invoke([HumanMessage(ASKED, name="somebody")]).content, SAID)
    expect([other.invoke(ASKED).text for other in models], [SAID] * len(models))


def stream() -> None:
    for other in models:
        expect("".join(chunk.text for chunk in other.stream(ASKED)), SAID)


def tools() -> None:
    turn = HumanMessage(ASKED)
    for bound in (model.bind_tools([add]), model.bind_tools([add], tool_choice="add", parallel_tool_calls=False)):
        first = bound.invoke([turn])
        (call,) = first.tool_calls
        expect((call["name"], call["args"]), ("add", ARGUMENTS))
        result = add.invoke(call)
        assert isinstance(result, ToolMessage)
        expect(model.bind_tools([add]).invoke([turn, first, result]).content, SAID)
        merged = None
        for chunk in bound.stream([turn]):
            merged = chunk if merged is None else merged + chunk
        expect([call["args"] for call in merged.tool_calls], [ARGUMENTS])
    for other in models:
        state = create_agent(other, [add], system_prompt="Be brief.").invoke({"messages": [turn]})
        expect([message.type for message in state["messages"]], ["human", "ai", "tool", "ai"])
        expect(state["messages"][-1].text, SAID)


def structured() -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        result = model.with_structured_output(Sum, method=method).invoke(ASKED_JSON)
        assert isinstance(result, Sum), result
        if method != "function_calling":
            expect(result, Sum(**ARGUMENTS))
    for other in models[1:]:
        result = other.with_structured_output(Sum, method="json_schema").invoke(ASKED_JSON)
        expect(result, Sum(**ARGUMENTS))


run("langchain-openai", plain=plain, stream=stream, tools=tools, structured=structured)
