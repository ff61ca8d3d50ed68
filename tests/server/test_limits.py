"""What the server refuses and how it shuts down: queue, deadline, API key, body size, drain, a dead engine."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from infer.config import EngineConfig, ServerConfig
from infer.server import service
from infer.server.address import bind, check_exposure, is_loopback, read_api_keys
from infer.server.runtime import Runtime
from tests.server import patient
from tests.server.harness import MODEL, MakeServer, slow_down, wait_until

LONG: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True, "temperature": 0}


def test_a_full_queue_is_a_429(make_server: MakeServer) -> None:
    with make_server(engine=EngineConfig(max_batch=1), max_waiting=2) as server, ThreadPoolExecutor(3) as pool:
        speed_up = slow_down(server)
        running = pool.submit(server.complete, **LONG | {"max_tokens": 120})
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1)
        waiting = [pool.submit(server.complete, max_tokens=1) for _ in range(2)]
        wait_until(lambda: server.metrics()["vllm:num_requests_waiting"] == 2)
        refused = server.complete(max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.openai.completions.create(model=MODEL, prompt="x")
        speed_up()
        patient = server.openai.with_options(max_retries=300)  # the client waits as long as Retry-After says
        assert patient.completions.create(model=MODEL, prompt="x", max_tokens=1).choices
        assert [task.result().status_code for task in (running, *waiting)] == [200, 200, 200]
        assert server.complete(max_tokens=1).status_code == 200
        # a list of prompts is accepted as a whole or not at all
        assert server.complete(prompt=["a"] * 4, max_tokens=1).status_code == 429
        assert server.complete(prompt=["a"] * 3, max_tokens=1).status_code == 200  # one runs, two wait
        assert server.complete(prompt=["a"] * 2, n=2, max_tokens=1).status_code == 429


def test_a_late_answer_is_a_504_and_a_late_stream_ends_with_an_error(make_server: MakeServer) -> None:
    with make_server(request_timeout_s=0.4) as server:
        slow_down(server)
        response = server.complete(**LONG)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        with pytest.raises(openai.APIError, match="request_timeout_s"):
            list(
                server.openai.completions.create(
                    model=MODEL, prompt="x", max_tokens=480, stream=True, extra_body={"ignore_eos": True}
                )
            )
        wait_until(lambda: server.metrics()["vllm:kv_cache_usage_perc"] == 0)
        assert server.metrics()['vllm:request_success_total{finished_reason="abort"}'] == 2


def test_every_endpoint_but_health_needs_a_key(make_server: MakeServer) -> None:
    keys = ["s3cret-of-a", "s3cret-of-b"]
    with make_server(api_keys=keys) as server:
        described = patient.get(f"{server.url}/openapi.json", headers={"authorization": f"Bearer {keys[0]}"}).json()
        routes = [(method, path) for path, methods in described["paths"].items() for method in methods]
        expected = {"/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/metrics", "/ready"}
        assert expected <= {path for _, path in routes}
        wrong_password = base64.b64encode(b"me:wrong").decode()
        for method, path in [*routes, ("get", "/"), ("get", "/openapi.json"), ("get", "/nowhere")]:
            if path == "/health":
                continue
            path = path.replace("{model_id}", MODEL)
            wrong = ("Bearer wrong", "Bearer", "Basic s3cret-of-a", f"Basic {wrong_password}")
            for headers in ({}, {"x-api-key": "wrong"}, *({"authorization": value} for value in wrong)):
                response = patient.request(method, server.url + path, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["type"] == "authentication_error"
                assert response.headers["www-authenticate"].startswith("Basic" if path == "/" else "Bearer")
        assert patient.get(f"{server.url}/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.openai.models.list()
        for key in keys:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).usage is not None
            assert patient.get(f"{server.url}/v1/models", headers={"x-api-key": key}).status_code == 200
            page = patient.get(f"{server.url}/", auth=("anybody", key))  # as a browser does it
            assert "Headway" in page.text


def test_tenants_share_no_cached_text(make_server: MakeServer) -> None:
    keys = ["s3cret-of-a", "s3cret-of-b"]
    with make_server(api_keys=keys) as server:

        def cached(key: str, **fields: Any) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": MODEL, "prompt": "prefix " * 20, "max_tokens": 8, "ignore_eos": True, **fields}
            usage = server.post("/v1/completions", body, headers=headers).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert cached(keys[0]) == 0
        assert cached(keys[0]) > 0
        assert cached(keys[1]) == 0
        # a client cannot choose a salt that reaches another tenant's cached text
        assert cached(keys[1], cache_salt=hashlib.sha256(keys[0].encode()).hexdigest() + "/") == 0


def test_a_large_body_is_refused_before_it_is_read(make_server: MakeServer) -> None:
    with make_server(max_body_bytes=2000, max_prompts=3) as server:
        assert server.complete(prompt="x" * 3000).status_code == 413

        def chunked() -> Any:
            yield from (b"x" * 500 for _ in range(10))

        assert patient.post(f"{server.url}/v1/completions", content=chunked()).status_code == 413
        assert server.complete(prompt=["a"] * 3, max_tokens=1).status_code == 200
        too_many = server.complete(prompt=["a"] * 4, max_tokens=1)
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "prompt")


def test_a_drain_finishes_what_runs_and_refuses_what_comes(make_server: MakeServer) -> None:
    with make_server() as server, ThreadPoolExecutor(2) as pool:
        speed_up = slow_down(server)
        running = pool.submit(server.complete, **LONG | {"max_tokens": 100})
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1)
        ending = pool.submit(server.finish)
        wait_until(lambda: server.service.runtime.state == "draining")
        health = patient.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        refused = server.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        speed_up()
        assert running.result().json()["usage"]["completion_tokens"] == 100
        assert ending.result() == 0


def test_what_does_not_finish_in_the_drain_ends_with_an_error(make_server: MakeServer) -> None:
    with make_server(drain_s=0.1) as server, ThreadPoolExecutor(3) as pool:
        slow_down(server)
        waiting = pool.submit(server.complete, **LONG)
        stream = server.openai.completions.create(
            model=MODEL, prompt="x", max_tokens=480, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = iter(stream)
        next(pieces)
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 2)
        ending = pool.submit(server.finish)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(pieces)
        assert waiting.result().status_code == 503
        assert ending.result() == 0
        assert not server.engine.has_work


def test_a_second_signal_ends_the_drain(make_server: MakeServer) -> None:
    with make_server(drain_s=600) as server, ThreadPoolExecutor(1) as pool:
        slow_down(server)
        running = pool.submit(server.complete, **LONG)
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1)
        server.ask()
        wait_until(lambda: server.service.runtime.state == "draining")
        assert not running.done()
        assert server.finish() == 0
        assert (running.result().status_code, running.result().json()["error"]["code"]) == (503, "draining")


def test_a_prompt_that_takes_too_long_to_read(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a template that loops."""
    with make_server() as server:
        monkeypatch.setattr(service, "ENCODE_LIMIT_S", 0.05)
        slow, render_chat = threading.Event(), server.service.tokenizer.render_chat

        def render(*args: Any, **options: Any) -> str:
            slow.wait(600)
            return render_chat(*args, **options)

        server.service.tokenizer.render_chat = render
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        response = server.post("/v1/chat/completions", body)
        slow.set()
        assert (response.status_code, response.json()["error"]["code"]) == (400, "prompt_timeout")


def test_a_dead_engine_is_reported_everywhere(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    with make_server() as server:
        stream = server.openai.completions.create(
            model=MODEL, prompt="CANARY", max_tokens=480, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = iter(stream)
        next(pieces)

        def broken() -> None:
            raise RuntimeError("the device is gone")

        with caplog.at_level(logging.INFO):
            server.engine.step = broken  # a fault in the real engine's next step
            with pytest.raises(openai.APIError, match="the engine has stopped"):
                list(pieces)
            wait_until(lambda: patient.get(f"{server.url}/health").status_code == 503)
        assert "the device is gone" in caplog.text
        assert "CANARY" not in caplog.text
        after = server.complete()
        assert (after.status_code, after.json()["error"]["code"]) == (503, "dead")
        assert patient.get(f"{server.url}/metrics").status_code == 200
        assert server.finish() == 1


def test_a_failure_in_one_request_is_that_request_s_alone(make_server: MakeServer) -> None:
    with make_server() as server:
        add = server.engine.add

        def picky(prompt_ids: list[int], *args: Any, **options: Any) -> str:
            if prompt_ids == [7, 7, 7]:
                raise RuntimeError("a defect that this prompt alone brings out")
            return add(prompt_ids, *args, **options)

        server.engine.add = picky
        failed = server.complete(prompt=[7, 7, 7])
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        assert "defect" not in failed.text
        assert server.complete(prompt=[7, 7], max_tokens=2).status_code == 200
        assert patient.get(f"{server.url}/health").status_code == 200


def test_503_while_loading() -> None:
    """HTTP responds with 503 while the model loads; a failed load ends the server with the load's error."""
    from infer.server.address import url
    from infer.server.lifecycle import Stopping, run

    may_fail = threading.Event()

    def load() -> Any:
        assert may_fail.wait(600)
        raise ValueError("model.path=nowhere: no such folder")

    listener = bind("127.0.0.1", 0)
    runtime = Runtime(load, ServerConfig())

    async def main() -> None:
        serving = asyncio.ensure_future(
            run(
                MODEL, runtime, listener, Stopping(), api_keys=(), on_ready=lambda *ready: pytest.fail("nothing loaded")
            )
        )
        async with httpx.AsyncClient(base_url=url(listener), timeout=patient.SECONDS) as client:
            health = await client.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "loading"})
            completion = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
            for refused in (completion, await client.get("/ready"), await client.get("/v1/models")):
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
                assert int(refused.headers["retry-after"]) >= 1
            assert (await client.get("/")).status_code == 200
        may_fail.set()
        with pytest.raises(ValueError, match="nowhere"):
            await serving

    asyncio.run(main())


def test_only_loopback_without_a_key() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert is_loopback(host)
        check_exposure(ServerConfig(host=host), ())
    for host in ("0.0.0.0", "::", "192.168.0.5", "example.org"):
        with pytest.raises(ValueError, match=r"server.host=.*HEADWAY_API_KEY.*server.insecure=true"):
            check_exposure(ServerConfig(host=host), ())
        check_exposure(ServerConfig(host=host), ["key"])
        check_exposure(ServerConfig(host=host, insecure=True), ())


def test_where_keys_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    both = ServerConfig(api_keys_file=str(file))
    monkeypatch.delenv("HEADWAY_API_KEY", raising=False)
    assert read_api_keys(ServerConfig()) == ()
    with pytest.raises(ValueError, match="api_keys_file=.*cannot be read"):
        read_api_keys(both)
    file.write_text("# of the team\n\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_api_keys(both)
    file.write_text("# of the team\nkey-of-anna\n  key-of-ben \nkey-of-anna\n")
    assert read_api_keys(both) == ("key-of-anna", "key-of-ben")
    monkeypatch.setenv("HEADWAY_API_KEY", "key-of-mine")
    assert read_api_keys(both) == ("key-of-mine", "key-of-anna", "key-of-ben")
    for bad, message in ((" ", "HEADWAY_API_KEY"), ("short", "API key 1: must have at least 8")):
        monkeypatch.setenv("HEADWAY_API_KEY", bad)
        with pytest.raises(ValueError, match=message):
            read_api_keys(ServerConfig())


def test_an_address_that_cannot_be_had() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=rf"127.0.0.1:{port}.*server.port="):
            bind("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"server\.host=no\.such\.host\.invalid: no such address"):
        bind("no.such.host.invalid", 8000)
