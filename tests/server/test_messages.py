"""/v1/messages with Anthropic's client: a chat's conversation with the same token ids, in another format."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import pytest

from tests.server import patient
from tests.server.harness import MODEL, MakeServer, Server, named_events, slow_down
from tests.server.talking import ASKED
from tests.server.test_tools import ADD, NOW, PARAMETERS, WANTED

TOOL: dict[str, Any] = {"name": "add", "description": "adds", "input_schema": PARAMETERS}
NO_ARGUMENTS: dict[str, Any] = {"name": "now", "input_schema": NOW["function"]["parameters"]}
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 30, "temperature": 0}
USER: list[Any] = [{"role": "user", "content": "wrap this"}]
IDS: dict[str, Any] = {"return_token_ids": True}


def client_of(server: Server, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, max_retries=0, **{"api_key": "none", **options})


def sdk(messages: list[Any], *, max_tokens: int = 30, temperature: float = 0, **extra: Any) -> dict[str, Any]:
    """Return arguments for `messages.create`, which no longer has sampling parameters: they go into `extra_body`."""
    return {
        "model": MODEL,
        "max_tokens": max_tokens,
        "messages": messages,
        "extra_body": {"temperature": temperature, **extra},
    }


def message(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/messages", {**BODY, "messages": USER, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def chat_ids(server: Server, messages: list[Any], **fields: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the output by the chat endpoint."""
    response = server.post("/v1/chat/completions", {**BODY, "messages": messages, **IDS, **fields}).json()
    return response["prompt_token_ids"], response["choices"][0]["token_ids"]


def calls_of(content: list[Any]) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in content if block.type == "tool_use"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 40}])
def test_it_is_the_chat_with_the_same_ids(server: Server, sampling: dict[str, Any]) -> None:
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    turns = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "so?"}]},
        {"role": "user", "content": "more"},
    ]
    response = message(server, system=system, messages=turns, **sampling, **IDS)
    chat = [{"role": "system", "content": "be brief"}, *turns]
    prompt, ids = chat_ids(server, chat, **sampling)
    assert response["token_ids"] == ids
    usage = response["usage"]
    assert usage["output_tokens"] == len(ids)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    token_count = client_of(server).messages.count_tokens(model=MODEL, system=system, messages=turns)  # type: ignore[arg-type]
    assert token_count.input_tokens == len(prompt)
    again = message(server, system=system, messages=turns, **sampling)["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert again["input_tokens"] + again["cache_read_input_tokens"] == len(prompt)
    assert usage["output_tokens_details"]["rejected_prediction_tokens"] > 0


def test_anthropic_s_client(server: Server) -> None:
    client = client_of(server)
    request = sdk(USER, ignore_eos=True)
    full = client.messages.create(**request)
    (block,) = full.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert (full.type, full.role, full.model) == ("message", "assistant", MODEL)
    assert (full.stop_reason, full.stop_sequence) == ("max_tokens", None)
    with client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.to_dict()["content"] == full.to_dict()["content"]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 30)
    turn = [*USER, final.to_param(), {"role": "user", "content": "more"}]
    assert client.messages.create(**sdk(turn, max_tokens=2)).usage.output_tokens <= 2
    assert client.models.list().data[0].id == MODEL


def test_the_events_in_their_order(server: Server) -> None:
    body = {**BODY, "messages": USER, "stream": True, "ignore_eos": True, **IDS}
    response = server.post("/v1/messages", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response.text)
    deltas = len(events) - 5
    assert deltas > 1
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start, last = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 0
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 30
    assert last["token_ids"] == chat_ids(server, USER, ignore_eos=True)[1]
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_why_it_stopped(server: Server) -> None:
    free = message(server, ignore_eos=True)["content"][0]["text"]
    stop = free[len(free) // 2 :][:3]
    response = message(server, ignore_eos=True, stop_sequences=["never\x00", stop])
    assert (response["stop_reason"], response["stop_sequence"]) == ("stop_sequence", stop)
    assert response["content"][0]["text"] == free[: free.index(stop)]
    long = message(server, ignore_eos=True, max_tokens=100_000)  # as agents request, whatever the model
    assert long["stop_reason"] == "model_context_window_exceeded"
    usage = long["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
    assert total == server.engine.context


@pytest.mark.parametrize("style", ["hermes", "mistral"])
def test_the_model_calls_tools(talking: dict[str, Server], style: str) -> None:
    server = talking[style]
    client = client_of(server)
    question: list[Any] = [{"role": "user", "content": ASKED}]
    full = client.messages.create(**sdk(question, max_tokens=150), tools=[TOOL])
    assert calls_of(full.content) == WANTED
    assert full.stop_reason == "tool_use"
    assert [block.text for block in full.content if block.type == "text"] == ["I add.\n"] * (style == "hermes")
    with client.messages.stream(**sdk(question, max_tokens=150), tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert calls_of(final.content) == WANTED
    assert final.stop_reason == "tool_use"
    # The second turn has the same ids as that turn of a chat.
    calls = [block for block in full.content if block.type == "tool_use"]
    no = [{"type": "text", "text": "no"}]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "3"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": no,
            "is_error": True,
        },
        {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
    ]
    turn = [*question, full.to_param(), {"role": "user", "content": results}]
    token_count = client.messages.count_tokens(model=MODEL, tools=[TOOL], messages=turn)  # type: ignore[list-item]
    again = client.messages.create(**sdk(turn, max_tokens=8, **IDS), tools=[TOOL])
    text = "I add.\n" if style == "hermes" else ""
    functions = [
        {"id": call.id, "type": "function", "function": {"name": "add", "arguments": json.dumps(call.input)}}
        for call in calls
    ]
    chat = [
        *question,
        {"role": "assistant", "content": text, "tool_calls": functions},
        {"role": "tool", "tool_call_id": calls[0].id, "content": "3"},
        {"role": "tool", "tool_call_id": calls[1].id, "content": "no"},
        {"role": "user", "content": "go on"},
    ]
    prompt, ids = chat_ids(server, chat, tools=[ADD], max_tokens=8)
    assert token_count.input_tokens == len(prompt)
    assert again.to_dict()["token_ids"] == ids


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_call_can_be_required(talking: dict[str, Server], choice: dict[str, Any]) -> None:
    """Checked at a temperature so high that this model would not produce a valid call by itself."""
    client = client_of(talking["hermes"])
    request = sdk([{"role": "user", "content": ASKED}], max_tokens=200, temperature=2.0, seed=4) | {
        "tools": [NO_ARGUMENTS, TOOL],
        "tool_choice": choice | {"disable_parallel_tool_use": True},
    }
    full = client.messages.create(**request)
    assert full.stop_reason == "tool_use"
    ((name, arguments),) = calls_of(full.content)
    assert name == "add" if choice["type"] == "tool" else name in ("add", "now")
    jsonschema.validate(arguments, {"add": TOOL, "now": NO_ARGUMENTS}[name]["input_schema"])
    with client.messages.stream(**request) as stream:
        assert calls_of(stream.get_final_message().content) == [(name, arguments)]


def test_tools_of_anthropic_s_servers_are_left_out(talking: dict[str, Server]) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 150}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    response = message(talking["hermes"], **fields, tools=[search, TOOL])
    assert [(b["name"], b["input"]) for b in response["content"] if b["type"] == "tool_use"] == WANTED
    for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
        body = {**BODY, **fields, "tools": [search], "tool_choice": choice}
        refused = talking["hermes"].post("/v1/messages", body)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("tool_choice: ")


def test_a_call_that_is_cut(talking: dict[str, Server]) -> None:
    """Streamed or not, a truncated call keeps its complete arguments, and its stop reason is not `tool_use`."""
    client = client_of(talking["hermes"])
    inputs = []
    for limit in range(32, 64, 4):
        request = sdk([{"role": "user", "content": ASKED}], max_tokens=limit)
        request |= {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}
        full = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            final = stream.get_final_message()
        assert calls_of(final.content) == calls_of(full.content)
        if full.stop_reason == "max_tokens":
            inputs += [value for _, value in calls_of(full.content)]
    assert {} in inputs
    assert any(list(value) == ["a"] for value in inputs)


def test_thinking(talking: dict[str, Server]) -> None:
    client = client_of(talking["think"])
    request = sdk([{"role": "user", "content": ASKED}], max_tokens=2000)
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    full = client.messages.create(**request, thinking=thinking)
    first, second = full.content
    assert (first.type, first.thinking) == ("thinking", "\n1 and 2 is 3\n")  # type: ignore[union-attr]
    assert (second.type, second.text) == ("text", "It is 3.")  # type: ignore[union-attr]
    assert full.stop_reason == "end_turn"
    assert full.usage.output_tokens_details is not None
    assert 5 < full.usage.output_tokens_details.thinking_tokens < full.usage.output_tokens
    with client.messages.stream(**request) as stream:
        events = [event.type for event in stream]
        assert stream.get_final_message().to_dict()["content"] == full.to_dict()["content"]
    assert {"thinking", "signature", "text"} <= set(events)
    hidden = client.messages.create(**request, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert hidden.content[0].thinking == ""  # type: ignore[union-attr]
    assert hidden.usage.output_tokens_details == full.usage.output_tokens_details
    turn = [*request["messages"], full.to_param(), {"role": "user", "content": "and?"}]
    assert client.messages.create(**sdk(turn, max_tokens=2)).usage


def test_structured_output(server: Server) -> None:
    form = {"type": "json_schema", "schema": PARAMETERS}
    response = client_of(server).messages.create(
        **sdk(USER, max_tokens=150, output_config={"format": form, "effort": "low"})
    )
    (block,) = response.content
    assert response.stop_reason == "end_turn"
    jsonschema.validate(json.loads(block.text), PARAMETERS)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "x"}, "service_tier": "auto", "stop_sequences": [], "tools": [], "container": None},
        {"cache_control": {"type": "ephemeral"}, "thinking": {"type": "disabled"}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [*USER, {"role": "assistant", "content": []}, *USER, *USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": None}]}]},
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                {"role": "system", "content": "be brief"},
                *USER,
            ]
        },
    ],
)
def test_what_asks_for_nothing_is_accepted(server: Server, fields: dict[str, Any]) -> None:
    assert message(server, **fields, max_tokens=1)["usage"]["output_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be a string or a list of blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: must be text or tool_result here, not",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages: the last turn"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id: ",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id: ",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
            "messages[1].content[0].input: ",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: "),
        ({"tools": [TOOL, TOOL]}, "tools: two"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "rm"}}, "tool_choice: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"tools": [TOOL]}, "tools: calls of this template are not read: it shows the model no tools"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: "),
        ({"thinking": {"type": "sometimes"}}, "thinking.type: "),
    ],
)
def test_what_cannot_be_is_a_400_in_anthropic_s_shape(server: Server, fields: dict[str, Any], start: str) -> None:
    response = server.post("/v1/messages", {**BODY, "messages": USER, **fields}, headers={"x-request-id": "abc-1"})
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["request_id"], response.headers["request-id"]) == ("error", "abc-1", "abc-1")
    assert set(error["error"]) == {"type", "message"}
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(start), error


def test_other_errors_have_that_shape_too(make_server: MakeServer) -> None:
    with make_server(api_keys=["s3cret"], max_body_bytes=2000) as server:
        client = client_of(server, api_key="s3cret")  # sent as x-api-key
        assert client.messages.create(**sdk(USER)).usage
        assert client_of(server, api_key=None, auth_token="s3cret").messages.create(**sdk(USER)).usage
        with pytest.raises(anthropic.AuthenticationError) as wrong:
            client_of(server, api_key="s3cre").messages.create(**sdk(USER))
        assert wrong.value.type == "authentication_error"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(**sdk(USER) | {"model": "claude"})
        assert unknown.value.type == "not_found_error"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.list()
        with pytest.raises(anthropic.APIStatusError) as large:
            client.messages.create(**sdk([{"role": "user", "content": "x" * 3000}]))
        assert (large.value.status_code, large.value.type) == (413, "request_too_large")
        assert patient.post(f"{server.url}/v1/completions").json()["error"]["code"] == "invalid_api_key"


def test_an_error_in_the_stream(make_server: MakeServer) -> None:
    with make_server() as server:
        slow_down(server)
        body = {**BODY, "messages": USER, "max_tokens": 480, "stream": True, "ignore_eos": True, "timeout_s": 2}
        response = server.post("/v1/messages", body)
        last = named_events(response.text)[-1] if response.status_code == 200 else response.json()
        assert last["type"] == "error"
        assert last["error"]["type"] == "timeout_error"
        assert "timeout_s" in last["error"]["message"]
        request = sdk(USER, max_tokens=480, ignore_eos=True, timeout_s=2)
        with pytest.raises(anthropic.APIStatusError, match="timeout_s"):
            list(client_of(server).messages.create(**request, stream=True))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
def test_names_of_128_characters(talking: dict[str, Server], path: str) -> None:
    """In definitions, choices and history; names of MCP tools exceed the 64 that OpenAI documents for chats."""
    server, parameters = talking["hermes"], NO_ARGUMENTS["input_schema"]

    def body(name: str) -> dict[str, Any]:
        if path == "/v1/messages":
            turn = [{"type": "tool_use", "id": "1", "name": name, "input": {}}]
            result = [{"type": "tool_result", "tool_use_id": "1", "content": "3"}]
            history = [*USER, {"role": "assistant", "content": turn}, {"role": "user", "content": result}]
            tools = [{"name": name, "input_schema": parameters}]
            return {"messages": history, "tools": tools, "tool_choice": {"type": "tool", "name": name}}
        function = {"name": name, "parameters": parameters}
        if path == "/v1/responses":
            items = [{"type": "function_call", "call_id": "1", "name": name, "arguments": "{}"}]
            choice = {"type": "function", "name": name}
            return {"input": [*USER, *items], "tools": [{"type": "function", **function}], "tool_choice": choice}
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": "{}"}}
        history = [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]
        choice = {"type": "function", "function": {"name": name}}
        return {"messages": history, "tools": [{"type": "function", "function": function}], "tool_choice": choice}

    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for length, status in ((70, 200), (128, 200), (129, 400)):
        response = server.post(path, {"model": MODEL, limit: 250, **body("n" * length)})
        assert response.status_code == status, response.text
        assert status == 400 or f'"name":"{"n" * length}"' in response.text
