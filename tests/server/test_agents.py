"""What agents and SDKs of today send beside plain conversations, over HTTP: cases/README.md, section O."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import beta_tool

from infer.server.protocol.tools import MAX_TOOLS
from tests.chats import FOLDER
from tests.server import patient
from tests.server.harness import MODEL, MakeServer, Server, named_events
from tests.server.talking import ASKED
from tests.server.test_messages import BODY, TOOL, USER, message
from tests.server.test_tools import ADD, PARAMETERS

FUNCTION: dict[str, Any] = {"type": "function", **ADD["function"]}


@pytest.fixture(scope="module")
def alternating(make_server: MakeServer, tiny_target_folder: Path, tmp_path_factory: Any) -> Iterator[Server]:
    """A server whose template takes system turns first only, strict alternation, and ids of nine characters."""
    folder = tmp_path_factory.mktemp("alternating") / "target"
    shutil.copytree(tiny_target_folder, folder)
    shutil.copy(FOLDER / "mistral.jinja", folder / "chat_template.jinja")
    with make_server(target=folder, proposer="ngram") as running:
        yield running


def tokens(server: Server, messages: list[Any], **fields: Any) -> int:
    response = server.post("/tokenize", {"messages": messages, **fields})
    assert response.status_code == 200, response.text
    return response.json()["count"]


def rendered(server: Server, messages: list[Any], **fields: Any) -> str:
    ids = server.post("/tokenize", {"messages": messages, **fields}).json()["tokens"]
    return server.post("/detokenize", {"tokens": ids}).json()["prompt"]


def count(server: Server, **fields: Any) -> int:
    response = server.post("/v1/messages/count_tokens", {"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json()["input_tokens"]


def test_a_tool_runner_sends_the_whole_conversation(talking: dict[str, Server]) -> None:
    """Anthropic's SDK continues a thread on the server by default; refused, it sends all turns itself."""
    server, bodies = talking["hermes"], []
    hooks: Any = {"request": [lambda request: bodies.append(json.loads(request.content))]}
    http = anthropic.DefaultHttpxClient(event_hooks=hooks)
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, http_client=http)

    @beta_tool
    def add(a: int, b: int = 0) -> str:
        """adds"""
        return str(a + b)

    question: Any = {"role": "user", "content": ASKED}
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=150, messages=[question], tools=[add], max_iterations=2, extra_body={"temperature": 0}
    )
    first, second = list(runner)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"a": 1, "b": 2}, {"a": 3}]
    refused = [body for body in bodies if "thread" in body]
    assert refused
    last = bodies[-1]
    assert "thread" not in last
    assert [turn["role"] for turn in last["messages"]] == ["user", "assistant", "user"]
    results = [block["content"] for block in last["messages"][-1]["content"]]
    assert [result if isinstance(result, str) else result[0]["text"] for result in results] == ["3", "3"]
    whole = count(server, messages=last["messages"], tools=last["tools"])
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) == whole


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_is_refused_so_that_sdks_understand(server: Server, thread: dict[str, Any]) -> None:
    response = server.post("/v1/messages", {**BODY, "messages": USER, "thread": thread})
    assert response.status_code == 400
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert response.json()["error"]["details"] == details
    assert message(server, thread=None)["content"]


SYSTEM = {"role": "system", "content": "b"}
TURNS: list[Any] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PLACED = [  # turns beside a system text, and the turns that a template renders which takes it first only
    ([*TURNS, SYSTEM, TURNS[0]], [*TURNS, {"role": "user", "content": "b\n\nq"}]),
    ([TURNS[0], SYSTEM], [{"role": "user", "content": "q\n\nb"}]),
    ([TURNS[0], SYSTEM, TURNS[1], TURNS[0]], [{"role": "user", "content": "q\n\nb"}, TURNS[1], TURNS[0]]),
    ([*TURNS, SYSTEM], [*TURNS, SYSTEM | {"role": "user"}]),
    ([*TURNS, SYSTEM, SYSTEM, TURNS[0]], [*TURNS, {"role": "user", "content": "b\n\nb\n\nq"}]),
    ([TURNS[0], TURNS[0]], [{"role": "user", "content": "q\n\nq"}]),
]


@pytest.mark.parametrize(("turns", "placed"), PLACED)
def test_a_system_turn_anywhere(server: Server, alternating: Server, turns: list[Any], placed: list[Any]) -> None:
    """A template that takes it where it stands gets it there, as from transformers."""
    first = {"role": "system", "content": "s"}
    for role in ("system", "developer"):
        asked = [turn | {"role": role} if turn is SYSTEM else turn for turn in turns]
        wanted = tokens(alternating, [first, *placed])
        chat = {"model": MODEL, "max_tokens": 1, "messages": [first, *asked]}
        assert alternating.post("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"] == wanted
        items = {"model": MODEL, "max_output_tokens": 1, "instructions": "s", "input": asked}
        assert alternating.post("/v1/responses", items).json()["usage"]["input_tokens"] == wanted
    if all(turn["role"] != after["role"] for turn, after in pairwise(turns)):  # else /v1/messages makes them one turn
        assert count(alternating, system="s", messages=turns) == wanted
        assert count(server, system="s", messages=turns) == tokens(server, [first, *turns])
    assert message(alternating, system="s", messages=turns, max_tokens=1)["usage"]


def test_system_turns_in_a_row_at_the_front(alternating: Server) -> None:
    """Codex begins with several developer messages, and has its surroundings in a user turn of their own."""
    items = [{"role": "developer", "content": "d"}, {"role": "developer", "content": "e"}, TURNS[0], TURNS[0]]
    body = {"model": MODEL, "max_output_tokens": 1, "instructions": "s", "input": items}
    wanted = [{"role": "system", "content": "s\n\nd\n\ne"}, {"role": "user", "content": "q\n\nq"}]
    assert alternating.post("/v1/responses", body).json()["usage"]["input_tokens"] == tokens(alternating, wanted)


def test_a_system_turn_for_one_question(server: Server) -> None:
    turns = [TURNS[0], SYSTEM | {"clear_at": "next_user_message"}, TURNS[1], TURNS[0]]
    assert count(server, messages=turns[:2]) == tokens(server, [TURNS[0], SYSTEM])
    assert count(server, messages=turns) == tokens(server, [*TURNS, TURNS[0]])


def test_ids_of_calls_in_the_form_that_the_template_asks_for(alternating: Server) -> None:
    def turns(*ids: str | None) -> list[Any]:
        calls = [{"type": "function", "id": i, "function": {"name": "add", "arguments": "{}"}} for i in ids]
        results = [{"role": "tool", "tool_call_id": i, "content": str(n)} for n, i in enumerate(ids)]
        return [TURNS[0], {"role": "assistant", "tool_calls": calls}, *results]

    short = rendered(alternating, turns("abcdefgh1", "abcdefgh2"), tools=[ADD])
    for ids in (("toolu_1", "toolu_2"), ("x" * 200, "é"), ("abcdefgh1", "toolu_2")):
        text = rendered(alternating, turns(*ids), tools=[ADD])
        first, second = re.findall(r'"id": "([a-z0-9]{9})"', text)
        assert first != second
        assert (first == "abcdefgh1") == (ids[0] == "abcdefgh1")
        assert text.replace(first, "abcdefgh1").replace(second, "abcdefgh2") == short
    blocks = [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}]
    result = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "0"}]
    history = [TURNS[0], {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
    answered = message(alternating, messages=history, tools=[TOOL], max_tokens=1)
    assert answered["usage"]["input_tokens"] == tokens(alternating, turns("toolu_1"), tools=[ADD])


def test_the_older_name_of_the_output_s_format(server: Server) -> None:
    form = {"type": "json_schema", "schema": PARAMETERS}
    (block,) = message(server, output_format=form, max_tokens=150)["content"]
    jsonschema.validate(json.loads(block["text"]), PARAMETERS)
    both = {**BODY, "messages": USER, "output_format": form, "output_config": {"format": form}}
    assert "output_format: " in server.post("/v1/messages", both).json()["error"]["message"]


def test_tools_that_the_client_has_found(talking: dict[str, Server]) -> None:
    """Claude Code's ToolSearch: the result refers to tools, which the next request has in `tools`."""
    server = talking["hermes"]
    search = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "add"}, {"type": "text", "text": "ok"}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": found, "cache_control": {"type": "ephemeral"}}
    history = [*USER, {"role": "assistant", "content": [search]}, {"role": "user", "content": [result]}]
    text = [{"type": "text", "text": "The tool add can be called now."}, {"type": "text", "text": "ok"}]
    same = [*history[:2], {"role": "user", "content": [result | {"content": text}]}]
    tools = [TOOL, TOOL | {"name": "later", "defer_loading": True}]
    assert count(server, messages=history, tools=tools) == count(server, messages=same, tools=tools)
    found[0]["tool_name"] = "no name"
    refused = server.post("/v1/messages", {**BODY, "messages": history})
    assert "messages[2].content[0].content[0].tool_name: " in refused.json()["error"]["message"]


def test_tools_that_come_and_go(talking: dict[str, Server]) -> None:
    server, now = talking["hermes"], {"name": "now", "input_schema": {"type": "object"}}
    reference = {"type": "tool_reference", "name": "add"}
    removal, addition = ({"type": f"tool_{kind}", "tool": reference} for kind in ("removal", "addition"))
    define = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": now}}

    def called(*blocks: Any) -> set[str]:
        turns = [*USER, {"role": "system", "content": list(blocks)}, *USER]
        fields: dict[str, Any] = {"tool_choice": {"type": "any"}, "max_tokens": 400, "temperature": 2.0}
        answers = [message(server, messages=turns, tools=[TOOL], **fields, seed=seed) for seed in range(4)]
        return {block["name"] for answer in answers for block in answer["content"] if block["type"] == "tool_use"}

    assert called(removal, define) == {"now"}
    assert called(define, removal, addition) == {"add", "now"}
    turns = [*USER, {"role": "system", "content": [removal]}]
    assert server.post("/v1/messages", {**BODY, "messages": [*turns, *USER], "tools": [TOOL]}).status_code == 200
    forced = {**BODY, "messages": [*turns, *USER], "tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}
    assert server.post("/v1/messages", forced).status_code == 400


def test_additional_tools_of_codex(talking: dict[str, Server]) -> None:
    server, other = talking["hermes"], FUNCTION | {"name": "subtract"}
    inner = [other, {"type": "custom", "name": "exec", "format": {"type": "text"}}]
    spaces = [{"type": "namespace", "name": name, "description": "", "tools": inner} for name in ("functions", "calc")]
    item = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [FUNCTION, *spaces]}
    body = {"model": MODEL, "input": [item, {"role": "user", "content": ASKED}], "max_output_tokens": 300}
    plain = server.post("/v1/responses", {**body, "input": ASKED, "tools": [FUNCTION], "temperature": 0}).json()
    joined = server.post(
        "/v1/responses", {**body, "input": [item | {"tools": [FUNCTION]}, *body["input"][1:]], "temperature": 0}
    )
    assert [call["name"] for call in joined.json()["output"] if call["type"] == "function_call"] == ["add", "add"]
    assert joined.json()["usage"] == plain["usage"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "calc.subtract"}]}
    forced = server.post(
        "/v1/responses", {**body, "tool_choice": allowed, "parallel_tool_calls": False, "stream": True}
    )
    response = named_events(forced.text)[-1]["response"]
    (call,) = response["output"]
    assert (call["namespace"], call["name"]) == ("calc", "subtract")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    again = server.post("/v1/responses", {**body, "input": [*body["input"], call, result], "max_output_tokens": 1})
    assert again.status_code == 200, again.text
    named = {"type": "function", "name": "subtract"}
    (call,) = server.post("/v1/responses", {**body, "tool_choice": named}).json()["output"]
    assert call["name"] == "subtract"
    assert "namespace" not in call


@pytest.mark.parametrize("fields", [{}, {"instructions": "be brief"}])
def test_an_empty_input_is_an_empty_question(server: Server, fields: dict[str, Any]) -> None:
    """Clients probe whether the endpoint is there and the model loads."""
    body = {"model": MODEL, "max_output_tokens": 1, **fields}
    nothing, empty = (server.post("/v1/responses", {**body, "input": value}) for value in ([], ""))
    assert nothing.status_code == 200, nothing.text
    assert nothing.json()["usage"]["input_tokens"] == empty.json()["usage"]["input_tokens"]


@pytest.mark.parametrize(("number", "status"), [(129, 200), (MAX_TOOLS + 1, 400)])
def test_many_tools(talking: dict[str, Server], number: int, status: int) -> None:
    """Far below the bound of the list, the context bounds them."""
    schema = {"type": "object", "properties": {}}
    functions = [{"name": f"tool_{n}", "parameters": schema} for n in range(number)]
    requests: dict[str, dict[str, Any]] = {
        "/v1/messages": {"messages": USER, "tools": [{"name": f["name"], "input_schema": schema} for f in functions]},
        "/v1/chat/completions": {"messages": USER, "tools": [{"type": "function", "function": f} for f in functions]},
        "/v1/responses": {"input": "x", "tools": [{"type": "function", **f} for f in functions]},
    }
    for path, body in requests.items():
        limit = "max_output_tokens" if "input" in body else "max_tokens"
        assert talking["hermes"].post(path, {"model": MODEL, limit: 1, **body}).status_code == status


def compressed(server: Server, encoding: str, content: bytes) -> Any:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return patient.post(f"{server.url}/v1/completions", content=content, headers=headers)


def test_compressed_bodies(make_server: MakeServer) -> None:
    with make_server(max_body_bytes=2000) as server:
        plain = json.dumps({"model": MODEL, "prompt": "def f(", "max_tokens": 4, "temperature": 0}).encode()
        text = compressed(server, "identity", plain).json()["choices"][0]["text"]
        for encoding, content in (
            ("gzip", gzip.compress(plain)),
            ("deflate", zlib.compress(plain)),
            ("GZIP", gzip.compress(plain)),
        ):
            assert compressed(server, encoding, content).json()["choices"][0]["text"] == text
            cut = compressed(server, encoding, content[:-3])
            assert (cut.status_code, cut.json()["error"]["code"]) == (400, "invalid_encoding")
            more = compressed(server, encoding, content + b"x")
            assert (more.status_code, more.json()["error"]["code"]) == (400, "invalid_encoding")
        bomb = gzip.compress(b" " * 50_000_000)
        large = json.dumps({"model": MODEL, "prompt": "x" * 2001}).encode()
        assert compressed(server, "gzip", bomb[:1999]).status_code == 413
        assert compressed(server, "gzip", gzip.compress(large)).status_code == 413
        assert compressed(server, "gzip", plain).status_code == 400
        for encoding in ("zstd", "br", "gzip, gzip", "x\x7f"):
            refused = compressed(server, encoding, plain)
            assert refused.status_code == 415
            assert refused.headers["accept-encoding"] == "gzip, deflate"
            assert encoding in refused.json()["error"]["message"]
        messages = {"content-encoding": "zstd", "content-type": "application/json"}
        error = patient.post(f"{server.url}/v1/messages", content=plain, headers=messages).json()["error"]
        assert "gzip and deflate" in error["message"]
        assert patient.get(f"{server.url}/v1/models", headers={"content-encoding": "gzip"}).status_code == 200
