"""Tool calls and reasoning over HTTP: by a model that has learnt them, and forced by a grammar."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.server.harness import MODEL, Server
from tests.server.talking import ASKED
from tests.server.test_wire import read_events

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
NOW: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
MESSAGES: list[Any] = [{"role": "user", "content": ASKED}]
WANTED = [("add", {"a": 1, "b": 2}), ("add", {"a": 3})]
STYLES = ("hermes", "llama3", "mistral")


def chat(server: Server, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 150, "tools": [ADD], **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return read_events(response.text) if fields.get("stream") else response.json()


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("style", STYLES)
def test_the_model_calls_by_itself(talking: dict[str, Server], style: str) -> None:
    response = chat(talking[style])
    (choice,) = response["choices"]
    assert calls_of(choice["message"]) == WANTED, choice
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ("I add.\n" if style == "hermes" else None)
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    if style == "mistral":
        assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    # the output repeats calls, so that lookup drafts several tokens per step: none of them may break a call
    assert response["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    plain = chat(talking[style], speculative={"enabled": False})
    assert calls_of(plain["choices"][0]["message"]) == WANTED


@pytest.mark.parametrize("style", STYLES)
def test_streamed_calls_are_the_calls(talking: dict[str, Server], style: str) -> None:
    deltas = [event["choices"][0]["delta"] for event in chat(talking[style], stream=True)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert calls_of({"tool_calls": calls}) == WANTED
    assert "".join(delta.get("content", "") for delta in deltas) == ("I add.\n" if style == "hermes" else "")
    reasons = [event["choices"][0]["finish_reason"] for event in chat(talking[style], stream=True)]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_openai_s_client_and_a_second_turn(talking: dict[str, Server]) -> None:
    client = talking["hermes"].openai
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[ADD], temperature=0)  # type: ignore[list-item]
    message = first.choices[0].message
    assert message.tool_calls
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
    turn: list[Any] = [*MESSAGES, message.model_dump(exclude_none=True), *results]
    again = client.chat.completions.create(model=MODEL, messages=turn, tools=[ADD], max_tokens=3)  # type: ignore[list-item]
    assert again.usage is not None
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[ADD], temperature=0) as stream:  # type: ignore[list-item]
        final = stream.get_final_completion()
    assert [call.function.name for call in final.choices[0].message.tool_calls or ()] == ["add", "add"]


@pytest.mark.parametrize(
    ("style", "stream"), [("hermes", False), ("hermes", True), ("llama3", False), ("mistral", True)]
)
def test_a_call_can_be_required(talking: dict[str, Server], style: str, stream: bool) -> None:
    """Checked at a temperature so high that this model would not produce a valid call by itself."""
    fields: dict[str, Any] = {"tools": [NOW, ADD], "temperature": 2.0, "seed": 4, "max_tokens": 200, "stream": stream}
    named = {"type": "function", "function": {"name": "add"}}
    for choice, max_calls in (("required", 8), ("required", 1), (named, 1)):
        request = fields | {"tool_choice": choice, "parallel_tool_calls": max_calls > 1 or choice is named}
        response = chat(talking[style], **request)
        if stream:
            deltas = [event["choices"][0] for event in response]
            reason = deltas[-1]["finish_reason"]
            message = {"tool_calls": [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]}
            assert not any(delta["delta"].get("content") for delta in deltas)
        else:
            message, reason = response["choices"][0]["message"], response["choices"][0]["finish_reason"]
            assert not message["content"]
        calls = calls_of(message)
        if reason == "tool_calls":
            assert 1 <= len(calls) <= max_calls
        for name, arguments in calls if reason == "tool_calls" else ():
            assert name == "add" if choice is named else name in ("add", "now")
            jsonschema.validate(arguments, {"add": ADD, "now": NOW}[name]["function"]["parameters"])
        off = chat(talking[style], **request, speculative={"enabled": False})
        if not stream:
            assert calls_of(off["choices"][0]["message"]) == calls


class Point(pydantic.BaseModel):
    x: int = pydantic.Field(ge=0, le=9)


class Line(pydantic.BaseModel):
    end: Point


LINE: dict[str, Any] = {"name": "line", "parameters": Line.model_json_schema()}
OTHER: dict[str, Any] = {
    "name": "other",
    "parameters": {
        "type": "object",
        "properties": {"p": {"$ref": "#/definitions/Point"}, "q": {"$ref": "#/properties/p"}},
        "required": ["p", "q"],
        "additionalProperties": False,
        "definitions": {"Point": {"enum": ["north", "south"]}},
    },
}


@pytest.mark.parametrize("style", STYLES)
def test_references_stay_inside_their_tool(talking: dict[str, Server], style: str) -> None:
    """References that pydantic writes for nested models, beside another tool's `Point`; in chats and in responses."""
    assert "$defs" in LINE["parameters"]
    server, completed = talking[style], set()
    tools = [LINE, OTHER]
    no_space = {str(token): -100 for form in (" ", "\n", "\t", "\r") for token in server.ids(form)}
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 1, "parallel_tool_calls": False, "logit_bias": no_space}
    for name in ("line", "other", None):
        choice: Any = "required" if name is None else {"type": "function", "function": {"name": name}}
        nested = [{"type": "function", "function": function} for function in tools]
        (chosen,) = chat(server, **fields, tools=nested, tool_choice=choice)["choices"]
        (call,) = chosen["message"]["tool_calls"]
        body = {"model": MODEL, "input": ASKED, "tools": [{"type": "function", **function} for function in tools]}
        body |= {"tool_choice": "required" if name is None else {"type": "function", "name": name}}
        response = server.post("/v1/responses", {**body, **fields, "max_output_tokens": 150})
        assert response.status_code == 200, response.text
        (item,) = response.json()["output"]
        assert {key: item[key] for key in ("name", "arguments")} == call["function"]
        assert name in (None, item["name"])
        if item["status"] == "completed":
            schema = {"line": LINE, "other": OTHER}[item["name"]]["parameters"]
            jsonschema.validate(json.loads(item["arguments"]), schema)
            completed.add(item["name"])
    assert completed == {"line", "other"}


def test_one_call_where_they_may_not_be_parallel(talking: dict[str, Server]) -> None:
    """Calls that the model makes by itself are limited too."""
    for style in STYLES:
        for stream in (False, True):
            response = chat(talking[style], parallel_tool_calls=False, stream=stream)
            if stream:
                calls = [call for event in response for call in event["choices"][0]["delta"].get("tool_calls", [])]
                assert response[-1]["choices"][0]["finish_reason"] == "tool_calls"
            else:
                calls = response["choices"][0]["message"]["tool_calls"]
            assert calls_of({"tool_calls": calls}) == WANTED[:1]


def test_none_calls_nothing(talking: dict[str, Server]) -> None:
    choice = chat(talking["hermes"], tool_choice="none")["choices"][0]
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_set_apart(talking: dict[str, Server], stream: bool) -> None:
    def parts(**fields: Any) -> tuple[str, str]:
        response = chat(talking["think"], tools=None, stream=stream, **fields)
        if stream:
            deltas = [event["choices"][0]["delta"] for event in response]
        else:
            deltas = [response["choices"][0]["message"]]
        return tuple("".join(part.get(name) or "" for part in deltas) for name in ("reasoning_content", "content"))  # type: ignore[return-value]

    assert parts() == ("\n1 and 2 is 3\n", "It is 3.")
    assert parts(include_reasoning=False) == ("", "It is 3.")


@pytest.mark.parametrize("drafts", [True, False])
def test_reasoning_is_counted(talking: dict[str, Server], drafts: bool) -> None:
    """Reasoning tokens are those that hold the span's text, however many come per step, whether shown or not."""
    server = talking["think"]
    fields: dict[str, Any] = {"tools": None, "speculative": {"enabled": drafts, "detail": True}}
    completion = chat(server, **fields)
    texts = [token["text"] for token in completion["choices"][0]["tokens"]]
    ends = list(itertools.accumulate(map(len, texts)))
    full = "".join(texts)
    begin, end = full.index("<think>") + 7, full.index("</think>")
    expected = sum(stop - len(text) < end and stop > begin for text, stop in zip(texts, ends, strict=True) if text)
    assert 5 < expected < len(texts)
    assert completion["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected
    hidden = chat(server, **fields, include_reasoning=False)
    assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chat(server, **fields, stream=True, stream_options=options)
    counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == expected
    pair = chat(server, **fields, n=2)
    assert pair["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * expected
    body = {"model": MODEL, "input": ASKED, "temperature": 0, "speculative": {"enabled": drafts}}
    response = server.post("/v1/responses", body).json()
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == expected
    last = server.post("/v1/responses", body | {"stream": True}).text.strip().splitlines()[-1]
    assert (
        json.loads(last.removeprefix("data: "))["response"]["usage"]["output_tokens_details"]
        == (response["usage"]["output_tokens_details"])
    )


def test_where_no_reasoning_can_be_none_is_counted(talking: dict[str, Server]) -> None:
    response = chat(talking["hermes"], speculative={"enabled": False})
    assert "completion_tokens_details" not in response["usage"]
    bound = chat(talking["think"], tools=None, structured_outputs={"choice": ["<think>a</think>b"]})
    assert bound["choices"][0]["message"]["content"] == "<think>a</think>b"
    assert bound["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def tools_with(parameters: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "x", "parameters": parameters}}]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web"}], "tool_choice": {"type": "web"}}, "tool_choice.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [ADD] * 200}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": "mine"}}, "chat_template_kwargs.messages"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "3"}]}, "messages[1].tool_call_id"),
        ({"tools": tools_with({"type": "wibble"}), "tool_choice": "required"}, "tools"),
        ({"tools": tools_with({"type": "array"}), "tool_choice": "required"}, "tools"),
        ({"tools": tools_with({"$ref": "#/$defs/nowhere"}), "tool_choice": "required"}, "tools"),
        ({"tools": tools_with({"properties": {"a": False}, "required": ["a"]}), "tool_choice": "required"}, "tools"),
        ({"tools": tools_with([])}, "tools[0].function.parameters"),
        ({"tools": tools_with(deep(33))}, "tools"),
        ({"tools": tools_with(deep(400))}, "tools"),
    ],
)
def test_what_cannot_be_is_a_400(talking: dict[str, Server], fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, **fields}
    response = talking["hermes"].post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_a_model_without_tools_says_so(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="no tools"):
        server.openai.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[ADD])  # type: ignore[list-item]


def allowed(mode: str, *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `tool_choice` that allows these tools, of chats and of responses."""
    nested = [{"type": "function", "function": {"name": name}} for name in names]
    flat = [{"type": "function", "name": name} for name in names]
    chosen = {"type": "allowed_tools"}
    return chosen | {"allowed_tools": {"mode": mode, "tools": nested}}, chosen | {"mode": mode, "tools": flat}


def response(server: Server, **fields: Any) -> Any:
    tools = [{"type": "function", **tool["function"]} for tool in fields.pop("tools")]
    body = {"model": MODEL, "input": ASKED, "max_output_tokens": 150, "tools": tools, **fields}
    return server.post("/v1/responses", body)


@pytest.mark.parametrize("style", STYLES)
def test_only_allowed_tools_are_called(talking: dict[str, Server], style: str) -> None:
    no_space = {str(token): -100 for form in (" ", "\n", "\t", "\r") for token in talking[style].ids(form)}
    sampling: dict[str, Any] = {"temperature": 1.5, "logit_bias": no_space, "parallel_tool_calls": False}
    for seed in range(3):
        for name in ("now", "add"):
            nested, flat = allowed("required", name)
            fields = {"tools": [NOW, ADD], "seed": seed, **sampling}
            message = chat(talking[style], **fields, tool_choice=nested)["choices"][0]["message"]
            assert [call for call, _ in calls_of(message)] == [name]
            document = response(talking[style], **fields, tool_choice=flat).json()
            assert [item["name"] for item in document["output"]] == [name]
            assert document["tool_choice"] == flat


def test_allowed_tools_may_but_need_not_be_called(talking: dict[str, Server]) -> None:
    for names, calls in ((("add",), WANTED), (("add", "now"), WANTED), (("now",), []), ((), [])):
        nested, flat = allowed("auto", *names)
        fields: dict[str, Any] = {"tools": [ADD, NOW], "tool_choice": nested}
        if "add" in names:  # the prompt that the model has learnt holds the number of tools
            fields["tools"] = [ADD] if names == ("add",) else [ADD, NOW]
        message = chat(talking["hermes"], **fields)["choices"][0]["message"]
        if len(names) == 1 and calls:
            assert calls_of(message) == calls
        assert {name for name, _ in calls_of(message)} <= set(names)
        assert response(talking["hermes"], tools=[ADD, NOW], tool_choice=flat).status_code == 200


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        (allowed("required"), "required needs tools that are functions"),
        (allowed("auto", "rm"), "'rm' is not among the tools"),
        (allowed("required", "add", "rm"), "'rm' is not among the tools"),
        (allowed("sometimes", "add"), "'auto' or 'required'"),
        (({"type": "allowed_tools"}, {"type": "allowed_tools"}), ""),
    ],
)
def test_allowed_tools_that_cannot_be(talking: dict[str, Server], choice: Any, why: str) -> None:
    nested, flat = choice
    body = {"model": MODEL, "messages": MESSAGES, "tools": [ADD], "tool_choice": nested}
    for answer in (
        talking["hermes"].post("/v1/chat/completions", body),
        response(talking["hermes"], tools=[ADD], tool_choice=flat),
    ):
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"].startswith("tool_choice")
        assert why in error["message"]


def test_allowed_tools_of_other_types_are_left_out(talking: dict[str, Server]) -> None:
    nested, flat = allowed("required", "add")
    nested["allowed_tools"]["tools"].append({"type": "web_search"})
    flat["tools"].append({"type": "mcp", "server_label": "x"})
    message = chat(talking["hermes"], tools=[NOW, ADD], tool_choice=nested, max_tokens=400)["choices"][0]["message"]
    assert {name for name, _ in calls_of(message)} == {"add"}
    assert response(talking["hermes"], tools=[NOW, ADD], tool_choice=flat).status_code == 200


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "x"}}])
def test_a_number_that_a_forced_call_could_not_keep_is_a_400(talking: dict[str, Server], tool_choice: Any) -> None:
    schema = {"type": "object", "properties": {"id": {"enum": [1, 2**53 + 1]}}, "required": ["id"]}
    tools = tools_with(schema)
    flat = tool_choice if isinstance(tool_choice, str) else {"type": "function", "name": "x"}
    tool = {"name": "x", "input_schema": schema}
    anthropic = {"type": "any"} if isinstance(tool_choice, str) else {"type": "tool", "name": "x"}
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 9}
    server = talking["hermes"]
    for answer in (
        server.post("/v1/chat/completions", body | {"tools": tools, "tool_choice": tool_choice}),
        response(server, tools=tools, tool_choice=flat),
        server.post("/v1/messages", body | {"tools": [tool], "tool_choice": anthropic}),
    ):
        assert answer.status_code == 400, answer.text
        assert f"the parameters of x: enum {2**53 + 1} is beyond 2^53" in answer.json()["error"]["message"]
    chat(server, tools=tools, max_tokens=5)  # under `auto` nothing is enforced
