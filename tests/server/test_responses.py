"""/v1/responses with OpenAI's client: complete, streamed, structured, with tools, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.server.harness import MODEL, Server, named_events
from tests.server.talking import ASKED
from tests.server.test_tools import ADD, WANTED

TOOL: dict[str, Any] = {"type": "function", "strict": False, **ADD["function"]}


def events_of(text: str) -> list[dict[str, Any]]:
    events = named_events(text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_text(server: Server, client: openai.OpenAI) -> None:
    """The text is the same as a chat's, complete and streamed."""
    request: dict[str, Any] = {"model": MODEL, "input": "wrap this", "max_output_tokens": 30, "temperature": 0}
    response = client.responses.create(**request, instructions="be brief", extra_body={"seed": 3})
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "wrap this"}],
        max_tokens=30,
        temperature=0,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.output_tokens == chat.usage.completion_tokens
    if chat.choices[0].finish_reason == "length":
        assert (response.status, response.incomplete_details and response.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
    assert response.store is False  # type: ignore[attr-defined]
    events = list(client.responses.create(**request, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    again = client.responses.create(**request)
    assert "".join(deltas) == events[-1].response.output_text == again.output_text  # type: ignore[union-attr]
    turn: list[Any] = [{"role": "user", "content": "wrap this"}, *(item.model_dump() for item in again.output)]
    turn.append({"role": "user", "content": [{"type": "input_text", "text": "more"}]})
    assert client.responses.create(model=MODEL, input=turn, max_output_tokens=2).output


def test_the_events_in_their_order(server: Server) -> None:
    body = {
        "model": MODEL,
        "input": "x",
        "max_output_tokens": 12,
        "stream": True,
        "ignore_eos": True,
        "top_logprobs": 1,
    }
    response = server.post("/v1/responses", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    (item,) = events[-1]["response"]["output"]
    (part,) = item["content"]
    assert item["status"] == "incomplete"
    assert part["text"] == "".join(event.get("delta", "") for event in events)
    assert len(part["logprobs"]) == 12
    assert part["logprobs"] == [entry for event in events[4:-4] for entry in event["logprobs"]]
    assert events[2]["item"]["content"] == []
    assert events[-1]["response"]["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_a_form(client: openai.OpenAI) -> None:
    class Word(pydantic.BaseModel):
        good: bool

    response = client.responses.parse(model=MODEL, input="x", text_format=Word, max_output_tokens=150, temperature=0)
    if response.status == "completed":
        assert isinstance(response.output_parsed, Word)
    assert response.output_text.startswith("{")


@pytest.mark.parametrize("style", ["hermes", "mistral"])
def test_tools(talking: dict[str, Server], style: str) -> None:
    client = talking[style].openai
    request: dict[str, Any] = {"model": MODEL, "input": ASKED, "tools": [TOOL], "temperature": 0}
    response = client.responses.create(**request)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == WANTED
    assert response.output_text == ("I add.\n" if style == "hermes" else "")
    events = events_of(talking[style].post("/v1/responses", {**request, "stream": True}).text)
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], json.loads(event["arguments"])) for event in done] == WANTED
    assert events[-1]["type"] == "response.completed"
    results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    turn: list[Any] = [{"role": "user", "content": ASKED}, *(item.model_dump() for item in response.output), *results]
    assert client.responses.create(model=MODEL, input=turn, tools=[TOOL], max_output_tokens=2).usage  # type: ignore[list-item]
    forced = client.responses.create(
        **request | {"temperature": 1.5}, tool_choice={"type": "function", "name": "add"}, parallel_tool_calls=False
    )
    assert [item.type for item in forced.output] == ["function_call"]


def test_reasoning(talking: dict[str, Server]) -> None:
    response = talking["think"].openai.responses.create(model=MODEL, input=ASKED, temperature=0)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "It is 3."
    assert response.output[0].to_dict()["content"] == [{"type": "reasoning_text", "text": "\n1 and 2 is 3\n"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"include": ["everything"]}, "include[0]"),
        ({"reasoning": {"effort": "very"}}, "reasoning.effort"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"metadata": {str(key): "x" for key in range(17)}}, "metadata"),
    ],
)
def test_what_is_not_implemented_is_a_400(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.post("/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 1, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_an_error_in_the_stream(server: Server) -> None:
    body = {"model": MODEL, "input": "x", "stream": True, "ignore_eos": True, "timeout_s": 0.01}
    response = server.post("/v1/responses", body)
    last = events_of(response.text)[-1] if response.status_code == 200 else response.json()
    assert "timeout_s" in (last.get("message") or last["error"]["message"])
