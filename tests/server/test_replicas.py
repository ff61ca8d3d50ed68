"""`server.replicas=2`: two engines behind one address by Ray Serve, started and called as a user does it."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from infer.request import SamplingParams
from tests.server import patient
from tests.server.harness import wait_until
from tests.server.test_process import command, run, start

KEY = "a-key-of-mine"
SESSIONS = [f"session-{number}" for number in range(16)]


@pytest.mark.slow
def test_two_replicas_behind_one_address(
    tiny_target_folder: Path,
    plain_engine: Any,
    started_here: Callable[[], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", KEY)
    with start(*command(tiny_target_folder, "server.replicas=2", "server.drain_s=3600")) as process:
        url = process.wait_for(r"(http://127\.0\.0\.1:\d+): loading tiny, 2 times")[1]
        process.wait_for("try: curl", 600)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

        def counter(session: str, name: str = "headway_prompt_tokens_total") -> float:
            """Return a counter of the replica that serves this session."""
            headers = {"authorization": f"Bearer {KEY}", "x-session-id": session}
            match = re.search(
                rf"^{name}{{.*}} (\S+)$", patient.get(f"{url}/metrics", headers=headers).text, re.MULTILINE
            )
            assert match
            return float(match[1])

        def ask(session: str, **fields: Any) -> Any:
            request: dict[str, Any] = {"prompt": "def wrap(text):", "max_tokens": 24, "seed": 7, **fields}
            extra = {"ignore_eos": True, "return_token_ids": True}
            return client.completions.create(
                model="tiny", extra_headers={"x-session-id": session}, extra_body=extra, **request
            )

        assert patient.get(f"{url}/health").json() == {"status": "ready"}
        assert patient.get(f"{url}/v1/models").status_code == 401
        # Group sessions by replica: a request changes its replica's counters, which all sessions of that replica see.
        (expected,) = plain_engine.generate(
            ["def wrap(text):"], SamplingParams(1.0, seed=7, max_tokens=24, ignore_eos=True)
        )
        groups: list[set[str]] = []
        for session in SESSIONS:
            if any(session in group for group in groups):
                continue
            before = {s: counter(s) for s in SESSIONS}
            completion = ask(session)
            assert completion.choices[0].to_dict()["token_ids"] == expected.token_ids
            groups.append({s for s in SESSIONS if counter(s) > before[s]})
            assert session in groups[-1]
        assert len(groups) == 2
        assert groups[0].isdisjoint(groups[1])
        assert groups[0] | groups[1] == set(SESSIONS)
        prompt = "import textwrap\n" * 8
        cached = [
            ask(SESSIONS[0], prompt=prompt + more, max_tokens=2).usage.prompt_tokens_details.cached_tokens
            for more in ("", "x = 1\n", "y = 2\n")
        ]
        assert cached[0] == 0
        assert min(cached[1:]) >= 16
        stream = ask(SESSIONS[0], max_tokens=400, stream=True)
        next(iter(stream))
        assert counter(SESSIONS[0], "headway_num_requests_running") == 1
        stream.close()
        wait_until(lambda: counter(SESSIONS[0], "headway_num_requests_running") == 0)
        stream = ask(SESSIONS[0], max_tokens=100, stream=True)
        chunks = [next(iter(stream))]
        process.child.send_signal(signal.SIGTERM)
        chunks += list(stream)
        assert len(chunks) > 10
        assert chunks[-1].choices[0].finish_reason == "length"
        assert process.child.wait(300) == 0
    assert "Traceback" not in process.output
    assert KEY not in process.output
    wait_until(lambda: started_here() == [])


def test_mistakes_are_found_before_ray_starts(tiny_target_folder: Path) -> None:
    missing = run(*command("no/such/folder", "server.replicas=2"))
    assert (missing.returncode, "no/such/folder" in missing.stderr) == (2, True)
    divided = run(*command(tiny_target_folder, "server.replicas=2", "engine.tensor_parallel=2"))
    assert (divided.returncode, "server.replicas=2: not together with" in divided.stderr) == (2, True)


def test_a_call_that_ray_cancelled_is_a_client_that_hung_up() -> None:
    from ray.exceptions import TaskCancelledError

    from infer.server.ray_app import ProxyGone

    calls, disconnected = 0, False

    async def receive() -> Message:
        nonlocal calls
        calls += 1
        if calls == 1:
            return {"type": "http.request", "body": b"", "more_body": False}
        if calls > 2:  # Ray's `receive` raises once
            await asyncio.Event().wait()
        raise TaskCancelledError

    async def send(message: Message) -> None:
        pass

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal disconnected

        async def endless() -> AsyncIterator[str]:
            while True:
                yield "piece"
                await asyncio.sleep(0.01)

        request = Request(scope, receive)
        await request.body()
        await StreamingResponse(endless())(scope, receive, send)
        disconnected = await request.is_disconnected()

    scope = {"type": "http", "method": "POST", "headers": [], "asgi": {"spec_version": "2.1"}}
    asyncio.run(asyncio.wait_for(ProxyGone(app)(scope, receive, send), 300))
    assert (calls, disconnected) == (2, True)


def test_ray_is_started_again_when_a_busy_machine_was_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from infer.server import ray_app

    failures = iter([True, True, False])
    started: list[bool] = []

    def init(**options: Any) -> None:
        if next(failures, True):
            raise Exception("The current node timed out during startup.")
        started.append(True)

    monkeypatch.setattr(ray_app.ray, "init", init)
    ray_app.start_ray(2)
    assert started == [True]
    with pytest.raises(ValueError, match=r"server\.replicas=2: Ray did not start; The current node timed out"):
        ray_app.start_ray(2)
