"""Under which host names a server may be called, so that a page of a foreign name cannot reach one without a key."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from infer.config import ServerConfig
from infer.server.app import create_app
from infer.server.network.hosts import host_of, own_names
from tests.server import patient
from tests.server.harness import MODEL, MakeServer, Server

FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil",
    "10.0.0.5",
    "a@b",
    "[::2]:1",
    "]",
)


def exchange(server: Server, text: str) -> tuple[int, str]:
    """Send a request as it stands; return the status and the whole response."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=600) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode())
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    return int(received.split()[1]), received


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/no-such-path", "/v1/messages"])
def test_a_foreign_name_is_refused_in_words(server: Server, path: str, host: str) -> None:
    response = patient.get(f"{server.url}{path}", headers={"host": host})
    assert response.status_code == 403
    assert "server.allowed_hosts=[...]" in response.json()["error"]["message"]
    assert repr(host) in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "localhost.", "[::1]", "127.8.9.10"])
@pytest.mark.parametrize("port", ["", ":1", ":65535"])
def test_this_machines_names_pass_with_any_port(server: Server, name: str, port: str) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    assert server.post("/v1/completions", body, headers={"host": f"{name}{port}"}).status_code == 200
    assert patient.get(server.url, headers={"host": f"{name}{port}"}).status_code == 200


def test_every_method_and_form_of_a_request(server: Server) -> None:
    for method in ("OPTIONS", "HEAD", "POST", "DELETE"):
        assert patient.request(method, f"{server.url}/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert exchange(server, "GET /health HTTP/1.0\n\n")[0] == 200  # no browser leaves the name out
    assert exchange(server, "GET /health HTTP/1.1\n\n")[0] == 400
    assert exchange(server, "GET /health HTTP/1.1\nhost:\nconnection: close\n\n")[0] == 200
    two = "GET /health HTTP/1.1\nhost: localhost\nhost: evil.example\nconnection: close\n\n"
    assert exchange(server, two)[0] in (400, 403)
    for name, header, status in (
        ("evil.example", "localhost", 403),
        ("evil.example:80", "localhost", 403),
        ("localhost", "evil.example", 403),
        ("localhost:80", "localhost", 200),
    ):
        text = f"GET http://{name}/health?x=1 HTTP/1.1\nhost: {header}\nconnection: close\n\n"
        assert exchange(server, text)[0] == status, (name, header)
    upgrade = "GET / HTTP/1.1\nhost: evil.example\nconnection: upgrade, close\nupgrade: websocket\n\n"
    assert exchange(server, upgrade)[0] == 403


def test_a_key_and_a_named_host_let_others_in(make_server: MakeServer, server: Server) -> None:
    def get(name: str, api_keys: list[str], **settings: Any) -> int:
        service = server.service
        before, service.config = service.config, ServerConfig(**settings)
        app, service.config = create_app(service, api_keys=api_keys), before

        async def ask() -> int:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{name}") as client:
                return (await client.get("/v1/models", headers={"x-api-key": "a-long-key"})).status_code

        return asyncio.run(ask())

    assert get("evil.example", []) == 403
    assert get("evil.example", ["a-long-key"]) == 200, "behind a proxy"
    assert get("evil.example", [], host="0.0.0.0", insecure=True) == 200
    assert get("my.name", [], allowed_hosts=["My.Name"]) == 200
    assert get("evil.example", [], allowed_hosts=["my.name"]) == 403
    assert get("evil.example", [], allowed_hosts=["*"]) == 200
    assert get("evil.example", ["a-long-key"], allowed_hosts=["my.name"]) == 403
    assert get("localhost", ["a-long-key"], allowed_hosts=["my.name"], host="0.0.0.0") == 200
    assert get("evil.example", [], cors_origins=["https://app.example"]) == 403


def test_names() -> None:
    assert own_names(ServerConfig(host="127.0.0.2"), ()) == {"127.0.0.2"}
    names = {"[::1]:80": "::1", "A.b:": "a.b", "u:p@h:1": "h", "": "", "a b": "a b", "a:b": None, "h.": "h"}
    assert {text: host_of(text) for text in names} == names
    for wrong in ("http://a.b", "a.b:80", "a b", ""):
        with pytest.raises(ValueError, match=r"server\.allowed_hosts=.*: must be a name without scheme and port"):
            ServerConfig(allowed_hosts=[wrong])
    ServerConfig(allowed_hosts=["a.b", "*", "::1"])
