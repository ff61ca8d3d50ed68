"""Responses from a real server on a real socket: the same ids as our engine's, and the handling of server failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.engine import Engine
from infer.options.cli import compose
from models.tokenizer import Tokenizer
from tests.server.conftest import make_server  # noqa: F401  # a fixture
from tests.server.harness import MakeServer, Server
from train.config import DataConfig, TrainConfig
from train.data import answer_server
from train.data.answer_server import ServerGenerator
from train.data.examples import Example
from train.data.regenerate import EngineGenerator, collect_parts, read_parts, regenerate, sampling_params
from train.loop import train

TURNS = (("user", "say {}"), ("assistant", "-"), ("user", "and {}"))
EXAMPLES = {
    number: Example(messages=tuple({"role": role, "content": text.format(number)} for role, text in TURNS))
    for number in range(5)
} | {number: Example(ids=(5 + number, 6, 7)) for number in range(5, 12)}


@pytest.fixture(scope="module")
def server(make_server: MakeServer) -> Iterator[Server]:  # noqa: F811
    with make_server() as running:
        yield running


def data_for(url: str, **settings: Any) -> DataConfig:
    common: dict[str, Any] = {"max_new_tokens": 10, "temperatures": [0.0, 0.8], "concurrency": 4}
    return DataConfig(name="demo", server=f"{url}/v1", **(common | settings))


def respond(data: DataConfig, folder: Path, tokenizer: Tokenizer, answerer: Any = None) -> dict[int, str]:
    answerer = answerer or ServerGenerator(data, 384, first_pause=0.01)
    return regenerate(
        answerer,
        EXAMPLES,
        lambda number: sampling_params(number, data, 0),
        folder,
        tokenizer,
        longest_prompt=400,
    )


def test_a_server_answers_what_the_engine_answers(
    server: Server, engine: Engine, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data = data_for(server.url)
    assert respond(data, tmp_path / "server", tiny_tokenizer) == {}
    assert respond(data, tmp_path / "engine", tiny_tokenizer, EngineGenerator(engine)) == {}
    server_parts, engine_parts = (collect_parts(tmp_path / name, EXAMPLES, {}) for name in ("server", "engine"))
    assert server_parts.sequences.content_hash() == engine_parts.sequences.content_hash()


class Failing(BaseHTTPRequestHandler):
    """A proxy before the real server that makes every third response fail, in the way that `failure` names."""

    upstream, failure, count, lock = "", "", 0, threading.Lock()

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._pass(httpx.get(self.upstream + self.path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        with self.lock:
            type(self).count += 1
            fails = self.count % 3 == 0 or self.failure == "gone"
        if fails and self.failure in ("500", "gone"):
            self.send_response(500)
            self.end_headers()
            return
        if fails and self.failure == "hangs up":
            self.close_connection = True
            self.connection.close()
            return
        reply = httpx.post(self.upstream + self.path, content=body, headers={"content-type": "application/json"})
        content = reply.json()
        if self.failure == "no ids":
            del content["choices"][0]["token_ids"]
        if self.failure == "other ids":
            content["choices"][0]["token_ids"][0] = 384
        if self.failure == "another prompt":
            content["usage"]["prompt_tokens"] += 1
        self._pass(httpx.Response(reply.status_code, json=content))

    def _pass(self, reply: httpx.Response) -> None:
        self.send_response(reply.status_code)
        self.send_header("content-length", str(len(reply.content)))
        self.end_headers()
        self.wfile.write(reply.content)


@pytest.fixture
def failing(server: Server) -> Iterator[Any]:
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
    thread.start()
    Failing.upstream, Failing.count = server.url, 0

    def url(failure: str) -> str:
        Failing.failure = failure
        return f"http://127.0.0.1:{proxy.server_address[1]}"

    yield url
    proxy.shutdown()
    thread.join()
    proxy.server_close()


@pytest.mark.parametrize("failure", ["500", "hangs up"])
def test_passing_failures_are_tried_again(
    failure: str, failing: Any, tiny_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_server, "RETRIES", 6)
    assert respond(data_for(failing(failure)), tmp_path, tiny_tokenizer) == {}
    assert len(read_parts(tmp_path)) == len(EXAMPLES)
    assert Failing.count > 17  # 5 conversations of two turns, 7 prompts


def test_what_fails_for_good_is_left_to_the_next_run(
    failing: Any, tiny_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_server, "RETRIES", 0)
    data = data_for(failing("500"), concurrency=1)
    failed = respond(data, tmp_path, tiny_tokenizer)
    done = read_parts(tmp_path)
    assert failed
    assert set(failed.values()) == {"status 500: "}
    assert done.keys() | failed.keys() == EXAMPLES.keys()
    assert not done.keys() & failed.keys()
    monkeypatch.setattr(answer_server, "RETRIES", 6)
    assert respond(data, tmp_path, tiny_tokenizer) == {}
    assert read_parts(tmp_path).keys() == EXAMPLES.keys()


@pytest.mark.parametrize(
    ("failure", "complaint"),
    [
        ("gone", r"8 requests in a row failed, the last: status 500: \. What was answered is kept"),
        ("no ids", "its answers hold no token_ids"),
        ("other ids", "ids beyond this target's vocabulary of 384; it serves another model"),
        ("another prompt", r"read \d+ prompt tokens where \d+ were sent"),
    ],
)
def test_servers_that_cannot_serve_end_the_work(
    failure: str,
    complaint: str,
    failing: Any,
    tiny_tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_server, "RETRIES", 1)
    with pytest.raises(ValueError, match=complaint):
        respond(data_for(failing(failure)), tmp_path, tiny_tokenizer)


def test_a_run_asks_again_for_what_failed(
    failing: Any,
    tiny_target_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = [
        f"model.path={tiny_target_folder}", f"output_dir={tmp_path}", "stage=regenerate", "run=answers",
        "eval_prompts=2", "data.num_sequences=12", "data.prompt_tokens=8", "data.max_new_tokens=8", "eval_max_tokens=8",
        "tracker=none", "engine.max_tokens_in_cache=1024", "data.concurrency=1", f"data.server={failing('500')}/v1",
    ]  # fmt: skip

    def run(retries: int) -> dict[str, int]:
        monkeypatch.setattr(answer_server, "RETRIES", retries)
        result = train(compose("train", TrainConfig, settings))
        assert result is not None
        return result["counts"]["answers"]

    first = run(0)
    assert first["conversations"] == 12 == first["done"] + first["failed"]
    assert first["failed"] > 0
    failed = json.loads((tmp_path / "answers" / "data" / "failed.json").read_text())
    assert len(failed) == first["failed"]
    assert "conversations failed, the first: status 500" in capsys.readouterr().err
    requests_before = Failing.count
    assert run(6) == {"conversations": 12, "done": 12, "skipped": 0, "failed": 0}
    assert Failing.count - requests_before < 2 * first["failed"] + 2  # only the failed ones are requested again
    assert not (tmp_path / "answers" / "data" / "failed.json").exists()
    assert not (tmp_path / "answers" / "data" / "train").exists()


def test_a_server_that_is_not_there(server: Server) -> None:
    with pytest.raises(ValueError, match=r"data\.server=http://127\.0\.0\.1:9/v1: cannot be used: ConnectError"):
        ServerGenerator(data_for("http://127.0.0.1:9"), 384)
    with pytest.raises(ValueError, match=r"serves \S+, not data\.server_model=nope; give one of these"):
        ServerGenerator(data_for(server.url, server_model="nope"), 384)
    with pytest.raises(ValueError, match=r"data\.server=ftp://x/v1: must be an address"):
        data_for("ftp://x")
