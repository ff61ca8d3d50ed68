"""Effects of fields, and CORS, over HTTP: a strict server with an API key, an allowed origin and its own template."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.config import ServerConfig
from infer.server.app import create_app
from tests.server.harness import MODEL, MakeServer, Server

KEY = "s3cret"
PAGE = "https://app.example:8443"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{% if m.name %}={{ m.name }}{% endif %}:{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}|{% endfor %}"
    "effort={{ reasoning_effort }} thinks={{ enable_thinking }}"
)
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def strict(
    make_server: MakeServer, tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("telling")
    shutil.copytree(tiny_target_folder, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with make_server(target=folder, proposer="ngram", api_keys=[KEY], cors_origins=[PAGE], strict=True) as running:
        yield running


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    authorization = {"authorization": f"Bearer {KEY}"}
    return server.post(path, {"model": MODEL} | body, headers=authorization | headers)


def prompt_of(server: Server, **fields: Any) -> str:
    """Return the text that the template rendered for a chat."""
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, **fields}
    response = post(server, "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return post(server, "/detokenize", {"tokens": response.json()["prompt_token_ids"]}).json()["prompt"]


def test_names_and_reasoning_reach_the_template(strict: Server) -> None:
    messages = [
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": "b", "reasoning": "why"},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}], "reasoning_content": "how"},
        {"role": "user", "content": None},
    ]
    assert prompt_of(strict, messages=messages).startswith("user=Ann:a|assistant:b(why)|assistant:c(how)|user:|")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "effort= thinks="),
        ({"reasoning_effort": None}, "effort= thinks="),
        ({"reasoning_effort": "high"}, "effort=high thinks=True"),
        ({"reasoning_effort": "none"}, "effort=none thinks=False"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "effort=none thinks=True"),
        ({"chat_template_kwargs": {"enable_thinking": False, "unread": "x"}}, "effort= thinks=False"),
    ],
)
def test_the_effort_of_reasoning_reaches_templates_that_read_it(
    strict: Server, fields: dict[str, Any], expected: str
) -> None:
    assert prompt_of(strict, **fields) == f"user:x|{expected}"


def test_the_effort_changes_a_response_as_it_changes_a_chat(strict: Server) -> None:
    """Compared by the prompt tokens in `usage`: an effort lengthens the prompt, a summary alone does not."""
    counts = []
    for reasoning in (None, {"summary": "auto"}, {"effort": "medium", "summary": "auto"}):
        response = post(strict, "/v1/responses", {"input": "x", "max_output_tokens": 1, "reasoning": reasoning})
        counts.append(response.json()["usage"]["input_tokens"])
    assert counts[0] == counts[1] < counts[2]


def test_the_effort_is_accepted_where_no_template_reads_it(server: Server) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "seed": 1}
    plain = server.post("/v1/chat/completions", body).json()["choices"]
    assert server.post("/v1/chat/completions", body | {"reasoning_effort": "none"}).json()["choices"] == plain


def test_special_tokens_are_shown_where_asked_for(server: Server) -> None:
    special, letter = server.engine.tokenizer.special_tokens["eos_token"], server.ids("a")[0]
    forced = {"logit_bias": {"0": 100, str(letter): 99.9}, "ignore_eos": True, "max_tokens": 3, "temperature": 0}
    assert server.complete(**forced).json()["choices"][0]["text"] == ""
    assert server.complete(**forced, skip_special_tokens=False).json()["choices"][0]["text"] == special * 3


def test_stop_strings_are_looked_for_in_the_text_that_is_shown(server: Server) -> None:
    """The engine searches that text too, or it would generate on after the client has its complete output."""
    special = server.engine.tokenizer.special_tokens["eos_token"]
    forced = {"logit_bias": {"0": 100}, "ignore_eos": True, "max_tokens": 3, "temperature": 0, "stop": special * 2}
    for skip, tokens, reasons in ((True, 3, ("length", None)), (False, 2, ("stop", special * 2))):
        response = server.complete(**forced, skip_special_tokens=skip).json()
        (choice,) = response["choices"]
        assert choice["text"] == ""
        assert (choice["finish_reason"], choice["stop_reason"]) == reasons
        assert response["usage"]["completion_tokens"] == tokens


def test_the_old_names_of_structured_outputs(server: Server) -> None:
    for fields, options in (({"guided_choice": ["left"]}, ("left",)), ({"guided_regex": "(up|down)"}, ("up", "down"))):
        assert server.complete(**fields, max_tokens=20).json()["choices"][0]["text"] in options
        chat = server.post("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, **fields})
        assert chat.json()["choices"][0]["message"]["content"] in options


def test_many_stop_strings(server: Server) -> None:
    text = server.complete(max_tokens=30, ignore_eos=True, seed=5).json()["choices"][0]["text"]
    stops = [f"never {number}" for number in range(31)]
    choice = server.complete(max_tokens=30, ignore_eos=True, seed=5, stop=[*stops, text[8:11]]).json()["choices"][0]
    assert choice["stop_reason"] == text[8:11]
    assert choice["text"] == text[: text.index(text[8:11])]
    assert server.complete(stop=[*stops, "a", "b"]).json()["error"]["param"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "color": 1}, "color"),
        ("/v1/chat/completions", {"messages": [MESSAGES[0] | {"color": 1}], "max_tokens": 1}, "messages[0].color"),
        ("/v1/responses", {"input": [MESSAGES[0] | {"color": 1}], "max_output_tokens": 1}, "input[0].color"),
        ("/tokenize", {"prompt": "x", "color": 1}, "color"),
        ("/detokenize", {"tokens": [1], "color": 1}, "color"),
    ],
)
def test_unknown_fields_of_every_endpoint(
    strict: Server, server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    error = post(strict, path, body)
    assert (error.status_code, error.json()["error"]["code"]) == (400, "unknown_parameter")
    assert error.json()["error"]["param"] == param
    assert server.post(path, {"model": MODEL, **body}).status_code == 200


def test_a_browser_asks_before_it_sends_a_key(strict: Server) -> None:
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    url = f"{strict.url}/v1/chat/completions"
    response = httpx.options(url, headers={"origin": PAGE, **asking})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in response.headers
    stranger = httpx.options(url, headers={"origin": "https://evil.example", **asking})
    assert (stranger.status_code, stranger.headers.get("access-control-allow-origin")) == (400, None)


def test_answers_errors_and_streams_may_be_read_by_an_allowed_page(strict: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2}
    for response, status in (
        (post(strict, "/v1/chat/completions", body, origin=PAGE), 200),
        (post(strict, "/v1/chat/completions", body | {"stream": True}, origin=PAGE), 200),
        (post(strict, "/v1/chat/completions", body | {"temperature": 9}, origin=PAGE), 400),
        (post(strict, "/v1/chat/completions", body, origin=PAGE, authorization="Bearer wrong"), 401),
        (post(strict, "/v1/chat/completions", {"a": "x" * 5 * 2**20}, origin=PAGE), 413),
        (post(strict, "/nowhere", {}, origin=PAGE), 404),
    ):
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "x-request-id" in response.headers["access-control-expose-headers"].lower()
    stranger = post(strict, "/v1/chat/completions", body, origin="https://evil.example")
    assert "access-control-allow-origin" not in stranger.headers


def test_nobody_is_allowed_by_default(server: Server) -> None:
    asking = {"origin": PAGE, "access-control-request-method": "POST"}
    assert httpx.options(f"{server.url}/v1/completions", headers=asking).status_code == 405
    response = server.post(
        "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1}, headers={"origin": PAGE}
    )
    assert "access-control-allow-origin" not in response.headers


def test_an_internal_error_may_be_read_too_and_tells_nothing(strict: Server) -> None:
    app = create_app(strict.service, api_keys=[])

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a secret")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/broken", headers={"origin": PAGE})

    response = asyncio.run(ask())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["x-request-id"]
    assert "secret" not in response.text


@pytest.mark.parametrize("origins", [["app.example"], ["https://app.example/"], ["*", PAGE], ["null"], [""]])
def test_origins_are_checked_at_the_start(origins: list[str]) -> None:
    with pytest.raises(ValueError, match=r"server\.cors_origins"):
        ServerConfig(cors_origins=origins)
    ServerConfig(cors_origins=["*"])
    ServerConfig(cors_origins=["http://localhost:3000", "http://[::1]:3000"])
