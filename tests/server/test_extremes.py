"""Extremes of every field's type, at every endpoint, beside a running stream: no 5xx, and the stream is unaffected.

Endpoints and fields are read from the server's OpenAPI description, so new ones are tested automatically.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.request import SamplingParams
from tests.server import patient
from tests.server.harness import MODEL, Server

RAW = "raw text "  # prefix of a value that is inserted into the JSON verbatim
FLOAT32 = (2 - 2.0**-23) * 2.0**127
EXTREMES: list[Any] = [
    *(sign * (2**bits + add) for bits in (31, 32, 53, 63, 64, 128) for add in (-1, 0, 1) for sign in (1, -1)),
    *(sign * number for number in (0.0, 2.0**-126, 1e-40, 1e-45, 5e-324, FLOAT32, 1e39, 1e308) for sign in (1, -1)),
    *(RAW + text for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "-" + "9" * 4300)),
    *(RAW + text for text in ("[" * 5000 + "]" * 5000, '{"a":' * 300 + "1" + "}" * 300)),
    *(0, 1, -1, True, False, None, "", "x" * 100_000, "\ud800", "a\udfff", "\x00", "\U0001f600" * 200),
    *([], {}, [[]], [{}], [None], {"": None}, list(range(5000)), ["\ud800"] * 3, [""] * 100, [2**63, -1]),
    *({"\ud800": 1}, {"1": 1e308}, {str(2**63): 1}, {"5": -100}),
]  # fmt: skip
# Values of required fields, by name; a required field that is not listed here is left out.
NEEDED: dict[str, Any] = {
    "model": MODEL,
    "prompt": "x",
    "messages": [{"role": "user", "content": "x"}],
    "input": "x",
    "tokens": [5, 6],
    "max_tokens": 2,
    "max_output_tokens": 2,
}
SLOW = [HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large]
TIMEOUT = "timeout_s"  # a request with too short a timeout gets a 504


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def paths_in(schema: dict[str, Any], document: dict[str, Any], depth: int = 3) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of a schema: fields, nested fields, and the first item of each list."""
    schema = resolved(schema, document)
    for name, inner in schema.get("properties", {}).items():
        yield (name,)
        if depth:
            yield from ((name, *rest) for rest in paths_in(inner, document, depth - 1))
    if depth and isinstance(schema.get("items"), dict):
        yield (0,)
        yield from ((0, *rest) for rest in paths_in(schema["items"], document, depth - 1))
    for kind in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(kind, ()):
            yield from paths_in(inner, document, depth)


def put(body: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy of `body` with `value` at `path`, creating the objects and lists on the way that are missing."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        inner = body[0] if isinstance(body, list) and body else {}
        return [put(inner, rest, value)]
    body = dict(body) if isinstance(body, dict) else {}
    return {**body, first: put(body.get(first), rest, value)}


def written(body: Any) -> str:
    """Return `body` as JSON text, with `RAW` values inserted verbatim even where they are not valid JSON."""
    text = json.dumps(body)
    for extreme in EXTREMES:
        if isinstance(extreme, str) and extreme.startswith(RAW):
            text = text.replace(json.dumps(extreme), extreme.removeprefix(RAW))
    return text


class Beside:
    """Streams that run one after another, each compared with the tokens generated without other requests."""

    def __init__(self, server: Server, alone: list[int], body: dict[str, Any]) -> None:
        self._server, self._alone, self._body = server, alone, body
        self._over, self.wrong, self.ended = threading.Event(), list[Any](), 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(600)

    def _run(self) -> None:
        while not self._over.is_set():
            tokens: list[int] = []
            with httpx.stream("POST", f"{self._server.url}/v1/completions", json=self._body, timeout=120) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "choices" not in event:
                            self.wrong.append(event)
                        tokens += event["choices"][0].get("token_ids", ()) if event.get("choices") else ()
            if tokens != self._alone:
                self.wrong.append(tokens)
            self.ended += 1


def test_no_extreme_of_any_field_harms_anybody(server: Server, plain_engine: Any) -> None:
    count = 240
    body = {"model": MODEL, "prompt": "def f(", "max_tokens": count, "seed": 5, "ignore_eos": True, "stream": True}
    params = SamplingParams(temperature=1.0, max_tokens=count, seed=5, ignore_eos=True)
    alone = plain_engine.generate(["def f("], params)[0].token_ids
    schema = patient.get(f"{server.url}/openapi.json").json()
    endpoints = {
        path: (resolved(content["schema"], schema), sorted(set(paths_in(content["schema"], schema)), key=str))
        for path, methods in schema["paths"].items()
        if "requestBody" in methods.get("post", {})
        for content in [methods["post"]["requestBody"]["content"]["application/json"]]
    }
    generating = {f"/v1/{name}" for name in ("completions", "chat/completions", "responses", "messages")}
    assert generating | {"/v1/messages/count_tokens", "/tokenize", "/detokenize"} <= set(endpoints)
    assert ("speculative", "max_draft_tokens") in endpoints["/v1/completions"][1]
    assert ("messages", 0, "content") in endpoints["/v1/chat/completions"][1]

    @st.composite
    def requests(draw: st.DrawFn) -> tuple[str, str]:
        path = draw(st.sampled_from(sorted(endpoints)))
        fields, field_paths = endpoints[path]
        needed = {name: NEEDED[name] for name in fields["properties"] if name in NEEDED}
        if path == "/tokenize":
            del needed["messages"]
        for field_path in draw(st.lists(st.sampled_from(field_paths), min_size=1, max_size=2)):
            needed = put(needed, field_path, draw(st.sampled_from(EXTREMES)))
        return path, written(needed)

    @settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)
    @given(request=requests())
    def send(request: tuple[str, str]) -> None:
        path, content = request
        headers = {"content-type": "application/json"}
        reply = client.post(f"{server.url}{path}", content=content, headers=headers)
        timed_out = reply.status_code == 504 and TIMEOUT in content
        assert reply.status_code < 500 or timed_out, (path, content[:2000], reply.text)
        if reply.status_code == 400:
            assert set(reply.json()) - {"type", "request_id"} == {"error"}, reply.text  # these two are Anthropic's

    with Beside(server, alone, {**body, "return_token_ids": True}) as beside, httpx.Client(timeout=600) as client:
        send()
        assert beside.wrong == []
    assert beside.wrong == []
    assert beside.ended > 0
    assert patient.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(("path", "value"), [(("a", 0, "b"), 1), (("a",), None)])
def test_put(path: tuple[str | int, ...], value: Any) -> None:
    body = put({"c": 2}, path, value)
    assert body["c"] == 2
    assert (body["a"][0]["b"] if len(path) > 1 else body["a"]) == value
