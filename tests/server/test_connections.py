"""Connections whose clients keep them waiting: closed after a time, bounded in number; no others are disturbed."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from infer.config import ServerConfig
from infer.server.network import connections
from infer.server.network.connections import Bounds
from tests.server import patient
from tests.server.harness import MakeServer, Server, slow_down, wait_until
from tests.server.test_process import command, start

NOTHING = b""
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
HALF_A_BODY = HALF_A_HEAD + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let that many seconds pass for connections: no test then depends on how fast anything is."""
    passed = [0.0]
    clock = connections.monotonic
    monkeypatch.setattr(connections, "monotonic", lambda: clock() + passed[0])

    def later(seconds: float) -> None:
        passed[0] += seconds

    return later


@pytest.fixture
def dial(server: Server) -> Iterator[Callable[..., socket.socket]]:
    """Open a connection to the server, and send that."""
    with ExitStack() as stack:

        def dial(sent: bytes = b"", to: str = server.url) -> socket.socket:
            host, port = to.removeprefix("http://").split(":")
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=600))
            connection.sendall(sent)
            return connection

        yield dial


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize(("sent", "status"), [(NOTHING, b""), (HALF_A_HEAD, b"408"), (HALF_A_BODY, b"408")])
def test_a_request_that_does_not_arrive_is_waited_for_no_longer(
    sent: bytes, status: bytes, server: Server, dial: Any, later: Callable[[float], None], caplog: Any
) -> None:
    silent = [dial(sent) for _ in range(20)]
    assert patient.get(f"{server.url}/health").status_code == 200  # they have all arrived
    silent[0].settimeout(1.5)
    with pytest.raises(TimeoutError):
        silent[0].recv(1)
    silent[0].settimeout(600)
    with caplog.at_level(logging.WARNING, "headway.server"):
        later(61)
        answers = [until_closed(each) for each in silent]
    assert {answer[9:12] for answer in answers} == {status}
    assert all(b"server.client_timeout_s=60" in answer for answer in answers if status)
    assert len(caplog.records) <= 1, "one line for many"
    assert server.complete(max_tokens=1).status_code == 200


def test_a_slow_response_is_not_cut(server: Server, dial: Any, later: Callable[[float], None]) -> None:
    speed_up = slow_down(server, 0.2)
    with server.openai.completions.create(
        model="tiny", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}, temperature=0
    ) as stream, ThreadPoolExecutor(1) as pool:  # fmt: skip
        whole = pool.submit(server.complete, max_tokens=200, ignore_eos=True)
        chunks = [next(iter(stream))]
        for _ in range(3):
            silent = dial()
            assert patient.get(f"{server.url}/health").status_code == 200
            later(3600)
            assert until_closed(silent) == NOTHING  # so the others have been looked at
        speed_up()
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert whole.result().json()["usage"]["completion_tokens"] == 200


def test_a_response_that_nobody_reads_is_dropped(
    server: Server, dial: Any, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, pause = threading.Event(), connections.Connection.pause_writing
    monkeypatch.setattr(connections.Connection, "pause_writing", lambda self: (stuck.set(), pause(self)))
    connection = dial()

    def send_and_never_read() -> None:
        while True:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_and_never_read)
        assert stuck.wait(600)
        wait_until(lambda: bool(later(61)) or sending.done())
        assert isinstance(sending.exception(), ConnectionError)
    assert server.complete(max_tokens=1).status_code == 200


def test_of_too_many_connections_those_that_wait_longest_are_closed(
    make_server: MakeServer, dial: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with make_server(max_connections=4) as server, caplog.at_level(logging.WARNING, "headway.server"):
        silent = []
        for sent in (NOTHING, HALF_A_HEAD, HALF_A_BODY) * 5:
            silent.append(dial(sent, server.url))
            assert patient.get(f"{server.url}/health").status_code == 200
        for each in silent[:-4]:
            assert until_closed(each) == b""
        assert len([record for record in caplog.records if "connections" in record.message]) == 1
        speed_up = slow_down(server)
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(server.complete, max_tokens=60, ignore_eos=True) for _ in range(4)]
            wait_until(lambda: server.service.runtime.in_flight == 4)
            refused = until_closed(dial(NOTHING, server.url))
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"server.max_connections" in refused
            speed_up()
            assert [each.result().status_code for each in running] == [200] * 4


def test_half_of_the_descriptors_are_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: allowed.append(limits))
    for limits, most, raised in (
        ((1024, 4096), 1024, [(2048, 4096)]),
        ((128, 256), 128, [(256, 256)]),
        ((1024, resource.RLIM_INFINITY), 1024, [(2048, resource.RLIM_INFINITY)]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1024, []),
        ((65536, 65536), 1024, []),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert (Bounds(ServerConfig()).most, allowed) == (most, raised)
        allowed.clear()


def test_a_lack_of_descriptors_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bounds, loop = Bounds(ServerConfig()), asyncio.new_event_loop()
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for _ in range(2000):  # as often as asyncio says it
        bounds.on_loop_error(
            loop, {"message": "socket.accept() out of system resource", "exception": error, "socket": 1}
        )
    assert [record.message for record in caplog.records] == [
        "no connection can be accepted (Too many open files); 1 since this was last said"
    ]
    bounds.on_loop_error(loop, {"message": "a bug", "exception": ValueError("of ours")})
    assert "a bug" in caplog.text
    loop.close()


def test_others_are_answered_at_the_limit_of_descriptors(tiny_target_folder: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = command(tiny_target_folder)
    with start("prlimit", f"--nofile=96:{min(hard, 96)}", *words) as process, ExitStack() as stack:
        url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading")[1]
        process.wait_for("try: curl")
        host, port = url.removeprefix("http://").split(":")
        for sent in (NOTHING, HALF_A_HEAD, HALF_A_BODY) * 50:
            stack.enter_context(socket.create_connection((host, int(port)), timeout=600)).sendall(sent)
        answer = patient.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200
        assert len(process.output) < 10_000
