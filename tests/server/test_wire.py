"""What is sent over HTTP: server-sent events, headers, errors; and what happens when a client hangs up."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import httpx
import pytest

from tests.server import patient
from tests.server.harness import MODEL, Server, wait_until

LONG: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True, "temperature": 0}


def read_events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    lines = [line for line in text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion_stream_line_by_line(server: Server) -> None:
    body = {"max_tokens": 6, "seed": 1, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    response = server.complete(**body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    *chunks, last, usage = read_events(response.text)
    head = {"object": "text_completion", "model": MODEL, "seed": 1}
    for chunk in (*chunks, last, usage):
        assert {key: chunk[key] for key in head} == head
        assert chunk["id"] == last["id"]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["finish_reason"] is None
        assert choice["text"]
        assert chunk["usage"] is None
    assert last["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6


def test_no_usage_unless_asked_for(server: Server) -> None:
    events = read_events(server.complete(max_tokens=3, stream=True).text)
    assert all("usage" not in event for event in events)


def test_characters_are_never_cut(server: Server) -> None:
    """The random target emits raw bytes; every piece must still consist of whole characters."""
    body = {"max_tokens": 100, "seed": 11, "temperature": 2.0, "ignore_eos": True}
    full = server.complete(**body).json()["choices"][0]["text"]
    events = read_events(server.complete(**body, stream=True).text)
    assert "".join(event["choices"][0]["text"] for event in events) == full
    assert "\ufffd" in full  # otherwise this test shows nothing


def test_the_request_id_is_echoed(server: Server) -> None:
    response = server.post("/v1/completions", {}, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert "\n" not in server.post("/v1/completions", {}, headers={"x-request-id": "a b"}).headers["x-request-id"]


@pytest.mark.parametrize(
    ("content", "headers", "code"),
    [
        (b"{", {"content-type": "application/json"}, "invalid_json"),
        (b"\xff\xfe", {"content-type": "application/json"}, None),
        (b"[1]", {"content-type": "application/json"}, None),
        (b'{"model": "tiny", "prompt": "x"}', {"content-type": "text/plain"}, None),
        (b"", {}, None),
        (b"[" * 100_000, {"content-type": "application/json"}, None),
        (b'{"model": "tiny", "prompt": "\\ud800"}', {"content-type": "application/json"}, None),
        (b'{"model": "tiny", "prompt": ["a", "\\ud800"]}', {"content-type": "application/json"}, None),
        (b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", {"content-type": "application/json"}, None),
    ],
)
def test_a_body_that_is_no_request_is_a_400(
    server: Server, content: bytes, headers: dict[str, str], code: str | None
) -> None:
    response = patient.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if code:
        assert error["code"] == code


def test_a_message_that_is_no_text_is_a_400(server: Server) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\udfff"}]}'
    headers = {"content-type": "application/json"}
    assert patient.post(f"{server.url}/v1/chat/completions", content=body, headers=headers).status_code == 400


def test_what_the_engine_refuses_is_a_400(server: Server) -> None:
    size = server.engine.target.config.vocab_size
    for stream in (False, True):
        error = server.complete(prompt=[1, size], stream=stream)
        assert error.status_code == 400
        assert str(size) in error.json()["error"]["message"]
    context = server.engine.context
    for body in ({"prompt": [1] * context}, {"prompt": [1], "max_tokens": context}, {"prompt": "word " * 100_000}):
        assert server.complete(**body).json()["error"]["code"] == "context_length_exceeded"
    assert server.complete(prompt="").json()["error"]["code"] == "empty_prompt"
    assert server.complete(stop_token_ids=[size]).json()["error"]["param"] == "stop_token_ids"
    assert server.complete(prompt=[1] * (context - 2)).json()["usage"]["completion_tokens"] <= 2  # a smaller default


def test_one_bad_prompt_fails_its_request_and_no_other(server: Server) -> None:
    before = server.metrics()["vllm:kv_cache_usage_perc"]
    assert server.complete(prompt=[[1, 2], [10**6]]).status_code == 400
    assert server.complete(max_tokens=2).status_code == 200
    wait_until(lambda: server.metrics()["vllm:kv_cache_usage_perc"] == before == 0)


def test_unknown_endpoints_have_openai_s_shape(server: Server) -> None:
    assert patient.get(f"{server.url}/v1/embeddings").json()["error"]["code"] == "not_found"
    assert patient.get(f"{server.url}/v1/completions").status_code == 405


def test_a_hang_up_while_streaming_frees_the_pages(server: Server) -> None:
    before = server.metrics()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request(stream=True), timeout=300) as response:
        pieces = response.iter_text()  # httpx hangs up when the iterator is deleted
        next(pieces)
        assert server.metrics()["vllm:kv_cache_usage_perc"] > 0
    assert_aborted(server, before)


def test_a_hang_up_without_streaming_frees_the_pages(server: Server) -> None:
    before = server.metrics()
    with send(server, request(stream=False)):
        wait_until(lambda: server.metrics()["vllm:generation_tokens_total"] > before["vllm:generation_tokens_total"])
    assert_aborted(server, before)


def test_a_hang_up_while_waiting_leaves_the_queue(server: Server) -> None:
    """The engine runs four requests at once here; further ones wait."""
    before = server.metrics()
    with contextlib.ExitStack() as running:
        for _ in range(4):
            running.enter_context(send(server, request(stream=True)))
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 4)
        with send(server, request(stream=True, prompt=["a", "b"])):
            wait_until(lambda: server.metrics()["vllm:num_requests_waiting"] == 2)
        wait_until(lambda: server.metrics()["vllm:num_requests_waiting"] == 0)
        assert server.metrics()["vllm:num_requests_running"] == 4
    assert_aborted(server, before, count=6)


def send(server: Server, body: dict[str, Any]) -> socket.socket:
    """Send a request without reading the response; leaving the context hangs up."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def request(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "def f(", **LONG, **fields}


def assert_aborted(server: Server, before: dict[str, float], count: int = 1) -> None:
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    wait_until(lambda: server.metrics()[aborted] == before[aborted] + count)
    wait_until(lambda: server.metrics()["vllm:kv_cache_usage_perc"] == 0)
    after = server.metrics()
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < count * LONG["max_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [40]}),
    ],
)
def test_a_body_without_a_content_type_is_json(server: Server, path: str, body: dict[str, Any]) -> None:
    """But not from a web page, which could otherwise call without a preflight."""
    content = json.dumps({"model": MODEL, **body}).encode()
    for headers, status in (
        ({}, 200),
        ({"content-type": ""}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "text/plain"}, 400),
        ({"content-type": "application/x-www-form-urlencoded"}, 400),
        ({"origin": "https://page.example"}, 400),
        ({"content-type": "", "origin": "null"}, 400),
    ):
        response = patient.post(f"{server.url}{path}", content=content, headers=headers)
        assert response.status_code == status, (headers, response.text)
    broken = patient.post(f"{server.url}{path}", content=b"{")
    assert broken.status_code == 400
    assert "not valid JSON" in broken.text
