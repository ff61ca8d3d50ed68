"""The handle of a running server that tests use: its URL, clients, counters and the real engine inside it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from tests.server import patient

if TYPE_CHECKING:
    import openai

MODEL = "tiny"


@dataclass
class Server:
    url: str
    engine: Any
    service: Any
    finish: Callable[[], int]  # drains the server and returns its exit code
    ask: Callable[[], None]  # starts the drain, as one SIGTERM does

    @property
    def openai(self) -> openai.OpenAI:
        import openai  # takes 2 CPU seconds, which most tests of the server need not spend

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return patient.post(f"{self.url}{path}", json=body, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": "def f(", **fields})

    def ids(self, text: str) -> list[int]:
        return self.post("/tokenize", {"prompt": text}).json()["tokens"]

    def metrics(self) -> dict[str, float]:
        """Return metric values by sample name, without the labels that never vary."""
        samples = {}
        for line in patient.get(f"{self.url}/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                for label in ('engine="0",', 'engine="0"', f'model_name="{MODEL}",', f'model_name="{MODEL}"'):
                    name = name.replace(label, "")
                samples[name.replace(",}", "}").replace("{}", "")] = float(value)
        return samples


MakeServer = Callable[..., AbstractContextManager[Server]]


def named_events(text: str) -> list[dict[str, Any]]:
    """Parse a stream whose events are named after the `type` of their data, and check these names."""
    events = []
    for block in text.strip().split("\n\n"):
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def wait_until(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def repeat_until(condition: Callable[[], bool], work: Callable[[], None], seconds: float = 600) -> None:
    """Do `work` again and again; for conditions that need more of it the slower another process computes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        work()


def slow_down(server: Server, seconds: float = 0.5) -> Callable[[], None]:
    """Make every engine step take at least `seconds` until the returned function is called.

    Tests can then observe a request while it runs, however fast this machine computes and however late they look.
    """
    step, fast = server.engine.step, threading.Event()

    def slow() -> Any:
        fast.wait(seconds)
        return step()

    server.engine.step = slow
    return fast.set
