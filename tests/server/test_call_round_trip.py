"""Tool calls that the server sends are accepted in the next request, complete or truncated, and are strictly JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer.server.protocol.chat import ChatRequest
from infer.server.protocol.responses import ResponsesRequest
from infer.server.protocol.tools import MAX_CALLS
from models.chat import normalize_message
from tests.server.harness import MODEL, Server
from tests.server.talking import ASKED
from tests.server.test_tools import ADD, MESSAGES

Json = dict[str, Any]
TOOL: Json = {"type": "function", **ADD["function"]}
# arguments as a model may write them -> as they are sent: "=" unchanged, None as text that is no call
ARGUMENTS = {
    r'{"a": "\ud83d"}': r'{"a": "\ufffd"}',
    r'{"a":  "\ude00 \ud83d\ude00"}': r'{"a":  "\ufffd \ud83d\ude00"}',
    '{"a": 1e999, "b": -1E999}': "=",
    f'{{"a": {"9" * 30}, "a": 2}}': "=",
    '{"a": NaN}': None,
    '{"a": [-Infinity]}': None,
    "[1]": None,
    '{"a": ' + "[" * 101 + "]" * 101 + "}": None,
}
WRITTEN = {
    "hermes": 'So.<tool_call>\n{{"name": "add", "arguments": {}}}\n</tool_call>',
    "llama3": '{{"name": "add", "parameters": {}}}',
    "mistral": "So.[TOOL_CALLS]add[ARGS]{}",
}
FIELDS: Json = {"model": MODEL, "temperature": 0}
PATHS = ("/v1/chat/completions", "/v1/responses")


def written_exactly(server: Server, text: str) -> Json:
    """Constrain the output to exactly `text`; a `[TOOL_CALLS]` in it is generated as the special token."""
    pieces = [f"{json.dumps(piece, ensure_ascii=False)}" for piece in text.split("[TOOL_CALLS]") if piece]
    mark = f" <[{server.service.special_id('[TOOL_CALLS]')}]> "
    start = mark if text.startswith("[TOOL_CALLS]") else ""
    return {"structured_outputs": {"grammar": f"start: {start}{mark.join(pieces)}"}}


def strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} on the wire")

    document = json.loads(text, parse_constant=refuse)
    json.dumps(document, ensure_ascii=False).encode()  # no lone surrogates
    return document


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [strictly(line) for line in lines if line != "[DONE]"]


def chat_message(server: Server, *, stream: bool, **fields: Any) -> tuple[Json, str]:
    """Return the message as a client assembles it, and its finish reason."""
    body = FIELDS | {"messages": MESSAGES, "tools": [ADD], "stream": stream} | fields
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    if not stream:
        (choice,) = strictly(response.text)["choices"]
        return choice["message"], choice["finish_reason"]
    deltas = [event["choices"][0] for event in events_of(response.text)]
    message: Json = {"role": "assistant", "content": "".join(delta["delta"].get("content") or "" for delta in deltas)}
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    return message | ({"tool_calls": calls} if calls else {}), deltas[-1]["finish_reason"]


def response_items(server: Server, *, stream: bool, **fields: Any) -> list[Json]:
    response = server.post("/v1/responses", FIELDS | {"input": ASKED, "tools": [TOOL], "stream": stream} | fields)
    assert response.status_code == 200, response.text
    if not stream:
        return strictly(response.text)["output"]
    events = events_of(response.text)
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == (
        events[-1]["response"]["output"]
    )
    return events[-1]["response"]["output"]


def content_of(message: Json) -> tuple[str, list[tuple[str, str]]]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"] or "", [(call["name"], call["arguments"]) for call in calls]


def content_of_items(items: list[Json]) -> tuple[str, list[tuple[str, str]]]:
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    return text, [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]


def send_back(server: Server, message: Json, items: list[Json]) -> None:
    """Check that both endpoints accept the next turn and render it as the same conversation."""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message.get("tool_calls", [])]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": [{"type": "input_text", "text": "3"}]}
        for item in items
        if item["type"] == "function_call"
    ]
    chat = FIELDS | {"messages": [*MESSAGES, message, *results], "tools": [ADD], "max_tokens": 1}
    responses = FIELDS | {"input": [*MESSAGES, *items, *outputs], "tools": [TOOL], "max_output_tokens": 1}
    for path, body in zip(PATHS, (chat, responses), strict=True):
        response = server.post(path, body)
        assert response.status_code == 200, response.text
    if not items:
        return  # a response has no item for an empty message
    rendered = [
        [normalize_message(message) for message in body.conversation]
        for body in (ChatRequest(**chat), ResponsesRequest(**responses))
    ]
    for turns in rendered:
        for turn in turns:
            turn.pop("tool_call_id", None)
            for call in turn.get("tool_calls", ()):
                call.pop("id")
    assert rendered[0] == rendered[1]


@pytest.mark.parametrize("style", WRITTEN)
def test_whatever_a_model_writes_as_a_call(talking: dict[str, Server], style: str) -> None:
    for number, (written, returned) in enumerate(ARGUMENTS.items()):
        text = WRITTEN[style].format(written)
        fields = written_exactly(talking[style], text)
        content = "So." if text.startswith("So.") else ""
        expected = (text, []) if returned is None else (content, [("add", written if returned == "=" else returned)])
        stream = bool(number % 2)
        message, reason = chat_message(talking[style], stream=stream, **fields)
        assert (content_of(message), reason) == (expected, "stop" if returned is None else "tool_calls")
        items = response_items(talking[style], stream=not stream, **fields)
        assert content_of_items(items) == expected
        send_back(talking[style], message, items)


@pytest.mark.parametrize("style", WRITTEN)
def test_a_call_that_max_tokens_cut(talking: dict[str, Server], style: str) -> None:
    """Forced or not, the markup of a truncated call is never content, and the partial call is accepted as history."""
    server = talking[style]
    written = WRITTEN[style].format(ADD_ALL := '{"a": 12, "b": "x"}')
    tokens, named = len(server.ids(written)), {"type": "function", "function": {"name": "add"}}
    content = "So." if written.startswith("So.") else ""
    complete = set()
    for count in (tokens - 2, tokens - 12, tokens - 25):
        free = written_exactly(server, written)
        message, reason = chat_message(server, stream=False, max_tokens=count, **free)
        streamed, _ = chat_message(server, stream=True, max_tokens=count, **free)
        assert content_of(message) == content_of(streamed)
        assert content_of(message)[0] == content
        for name, arguments in content_of(message)[1]:
            assert (name, reason) == ("add", "length")
            assert ADD_ALL.startswith(arguments)
            complete.add(arguments == ADD_ALL)
        items = response_items(server, stream=False, max_output_tokens=count, **free)
        assert content_of_items(items) == content_of(message)
        for item in items:
            if item["type"] == "function_call":
                assert (item["status"] == "completed") == (item["arguments"] == ADD_ALL)
        send_back(server, message, items)
    assert complete >= {False}
    begun = set()
    for count in (2, 12, 40):
        forced: Json = {"tool_choice": named, "temperature": 1.5, "seed": count}
        message, reason = chat_message(server, stream=False, max_tokens=count, **forced)
        assert content_of(message) == content_of(chat_message(server, stream=True, max_tokens=count, **forced)[0])
        assert (message["content"] or "", reason) in (("", "length"), ("", "tool_calls"))
        calls = content_of(message)[1]
        assert len(calls) <= 1
        begun.add(len(calls))
        forced |= {"tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": count}
        items = response_items(server, stream=True, **forced)
        assert content_of_items(items) == content_of(message)
        send_back(server, message, items)
    assert begun == {0, 1}


def test_reasoning_goes_back(talking: dict[str, Server]) -> None:
    """Complete reasoning and reasoning truncated in the middle are both accepted as history."""
    for count in (100, 12):
        items = response_items(talking["think"], stream=False, tools=None, max_output_tokens=count)
        assert [item["type"] for item in items] == ["reasoning", "message"][: 1 + (count == 100)]
        message, _ = chat_message(talking["think"], stream=False, tools=None, max_tokens=count)
        assert message["reasoning_content"] == items[0]["content"][0]["text"]
        message.pop("refusal")
        chat = FIELDS | {"messages": [*MESSAGES, message, *MESSAGES], "max_tokens": 1}
        body = FIELDS | {"input": [*MESSAGES, *items, *MESSAGES], "max_output_tokens": 1}
        responses = [
            talking["think"].post(path, body)
            for path, body in (("/v1/chat/completions", chat), ("/v1/responses", body))
        ]
        assert [response.status_code for response in responses] == [200, 200]
        expected, turns = ChatRequest(**chat).conversation, ResponsesRequest(**body).conversation
        assert list(map(normalize_message, turns)) == list(map(normalize_message, expected))


def test_a_turn_may_have_more_calls_than_a_message_of_a_chat_may_list() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    (turn,) = ResponsesRequest(model=MODEL, input=[call] * (MAX_CALLS + 1)).conversation
    assert len(turn["tool_calls"]) == MAX_CALLS + 1
