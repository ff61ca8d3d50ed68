"""Faults of a running server, and what must hold after each: every client has an answer or an error."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx

from models.heads import DEFAULT_HEAD
from scripts.benchmarks.comparison.servers import counters
from scripts.faults.lab import CANARY, KEY, PATIENCE_S, Broken, Lab, Process, damage, limit_memory, suspend, wait_until

PROMPTS, LENGTHS, MAX_BATCH = 8, (16, 96), 4
SENDING_S = 3.0  # how long a client may take to send a request
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
COMPLETE, ERROR = "complete", "error"
HEAD = [f"head={DEFAULT_HEAD}", "learn=true", "learning.save=true", "learning.nice=0", "learning.every_tokens=400"]
LEARNING = [*HEAD, "learning.held_back=0.3", "learning.batch_tokens=128", "learning.pause_above=99", "learning.keep=2"]
KINDS = {  # of servers: what is added to the command
    "server": ["head=none", "proposer=suffix"],
    "learning head": LEARNING,
    "tensor parallel": ["head=none", "proposer=ngram", "engine.tensor_parallel=2"],
}


@dataclass(frozen=True)
class Body:
    """A request, and the ids of its answer when nothing disturbs the server."""

    fields: dict[str, Any]
    ids: list[int]


class Client:
    """Sends requests as good clients do, or bad ones: `hang_up` after so many events, `pause_s` before each of the
    first ones or between the bytes of the request.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._options: dict[str, Any] = {"headers": AUTHORIZED, "timeout": PATIENCE_S}

    def ids(self, fields: dict[str, Any]) -> list[int]:
        """Return the ids of an answer. Raises Broken if there is none."""
        response = httpx.post(self._url, json=fields, **self._options)
        if response.status_code != 200:
            raise Broken(f"a request is refused: {response.status_code} {response.text[:300]}")
        return response.json()["choices"][0]["token_ids"]

    def ask(self, body: Body, *, stream: bool, hang_up: int | None = None, pause_s: float = 0.0) -> str:
        """Return COMPLETE, or ERROR if the client is told of one. Raises Broken for anything else."""
        found, ended = list[int](), False
        try:
            if not stream:
                response = httpx.post(self._url, json=body.fields, **self._options)
                if response.status_code != 200:
                    return ERROR
                (choice,) = response.json()["choices"]
                found, ended = choice["token_ids"], choice["finish_reason"] == "length"
            else:
                for number, event in enumerate(self._events(body.fields | {"stream": True})):
                    time.sleep(pause_s if number < 4 else 0)
                    if "error" in event:
                        return ERROR
                    for choice in event["choices"]:
                        found += choice.get("token_ids") or []  # an event may have none
                        ended |= choice["finish_reason"] == "length"
                    if found != body.ids[: len(found)]:
                        raise Broken(f"other ids in a stream: {found}, not {body.ids}")
                    if number == hang_up:
                        return COMPLETE
        except httpx.TimeoutException as error:
            raise Broken(f"a request is lost: no answer and no error in {PATIENCE_S:.0f} s") from error
        except httpx.TransportError:
            return ERROR
        if not ended or found != body.ids:
            raise Broken(f"an answer is {'other than' if ended else 'cut without an error:'} {found}, not {body.ids}")
        return COMPLETE

    def _events(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with httpx.stream("POST", self._url, json=fields, **self._options) as response:
            if response.status_code != 200:
                yield {"error": response.status_code}
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def send_slowly(self, body: Body) -> None:
        """Send a byte a second. Raises Broken unless the server ends that."""

        def content() -> Iterator[bytes]:
            for byte in json.dumps(body.fields).encode():
                yield bytes([byte])
                time.sleep(1)

        begin = time.monotonic()
        with suppress(httpx.TransportError):
            response = httpx.post(self._url, content=content(), **self._options)
            if response.status_code == 200:
                raise Broken(f"a request was sent for {time.monotonic() - begin:.0f} s")


class Situation(NamedTuple):
    """What a fault can use: the server, the clients' bodies, and random numbers."""

    lab: Lab
    process: Process
    client: Client
    bodies: list[Body]
    random: Random

    @property
    def others(self) -> list[int]:
        """The processes that the server started."""
        return [pid for pid in self.lab.started() if pid != self.process.child.pid]


def hang_up(s: Situation) -> None:
    for _ in range(3):
        s.client.ask(s.random.choice(s.bodies), stream=True, hang_up=s.random.randrange(4))


def full_disk(s: Situation) -> None:
    with s.lab.full_disk():
        for _ in range(2 * len(s.bodies)):  # enough for a head to learn something that is then to be written
            s.client.ask(s.random.choice(s.bodies), stream=True)


def slow_disk(s: Situation) -> None:
    with s.lab.slow_disk():
        for _ in range(2 * len(s.bodies)):
            s.client.ask(s.random.choice(s.bodies), stream=True)


def no_memory(s: Situation) -> None:
    limit_memory(s.process.child.pid, 2 ** s.random.randrange(16, 26))
    with suppress(Broken):  # refused, or it has ended
        for _ in range(len(s.bodies)):
            s.client.ask(s.random.choice(s.bodies), stream=True)
    with suppress(OSError, ValueError):
        limit_memory(s.process.child.pid, None)


def kill_another(s: Situation) -> None:
    os.kill(s.random.choice(s.others), signal.SIGKILL)


class Fault(NamedTuple):
    act: Callable[[Situation], object]
    goes_on: bool | None = True  # the server; False: it ends, None: either
    error_free: bool = True  # no client is told of an error
    code: int | None = None  # its exit code where it ends; None: any but 0


def kill(s: Situation) -> None:
    s.process.child.kill()


def term(s: Situation) -> None:
    s.process.child.terminate()


def stop(s: Situation) -> None:
    suspend([s.process.child.pid], s.random.uniform(1, 3))


KILLED = Fault(kill, goes_on=False, error_free=False, code=-signal.SIGKILL)
FAULTS: dict[str, dict[str, Fault]] = {
    "server": {
        "kill -9": KILLED,
        "SIGTERM": Fault(term, goes_on=False, error_free=False, code=0),
        "SIGSTOP": Fault(stop),
        "clients hang up": Fault(hang_up),
        "sends a byte a second": Fault(lambda s: s.client.send_slowly(s.bodies[0])),
        "reads an event a second": Fault(lambda s: s.client.ask(s.bodies[0], stream=True, pause_s=1)),
        "full disk": Fault(full_disk),
        "slow disk": Fault(slow_disk),
        "memory limit": Fault(no_memory, goes_on=None, error_free=False),
    },
    "learning head": {
        "kill -9": KILLED,
        "kill -9 of the trainer": Fault(kill_another),
        "SIGSTOP of the trainer": Fault(lambda s: suspend(s.others, s.random.uniform(1, 3))),
        "full disk": Fault(full_disk),
        "slow disk": Fault(slow_disk),
    },
    "tensor parallel": {
        "kill -9": KILLED,
        "kill -9 of a rank": Fault(kill_another, goes_on=False, error_free=False, code=1),
        "SIGSTOP of a rank": Fault(lambda s: suspend(s.others, s.random.uniform(1, 3))),
    },
}


class Servers:
    """A server of each kind, started when it is needed; one runs at a time."""

    def __init__(self, lab: Lab, model: str, words: list[str], clients: int) -> None:
        self._lab, self._model, self._words, self._clients = lab, model, words, clients
        self._bodies: list[Body] = []
        self._kind, self._running = "", list[Process]()
        self.counts = Counter[str]()

    def names(self) -> list[tuple[str, str]]:
        return [(kind, name) for kind, faults in FAULTS.items() for name in [*faults, "damaged caches"]]

    def run(self, kind: str, name: str) -> None:
        """Let the fault happen while clients wait. Raises Broken if what must hold does not."""
        if name == "damaged caches":
            self.stop()
            files = [file for file in self._lab.caches.rglob("*") if file.is_file()]
            files += self._output(kind).rglob("*.safetensors")
            for _ in range(min(3, len(files))):
                damage(files, self._lab.random)
            return self._serve_again(kind)
        fault, process, random = FAULTS[kind][name], self._server(kind), self._lab.random
        situation = Situation(self._lab, process, self._client(process), self._bodies, random)
        with ThreadPoolExecutor(self._clients) as pool:
            asked = [
                pool.submit(situation.client.ask, random.choice(self._bodies), stream=random.random() < 0.7)
                for _ in range(2 * self._clients)
            ]
            time.sleep(random.uniform(0, 0.4))
            fault.act(situation)
        outcomes = Counter(each.result() for each in asked)
        self.counts.update(outcomes)
        if fault.error_free and outcomes[ERROR]:
            raise Broken(f"{outcomes[ERROR]} clients were told of an error")
        if fault.goes_on is False or (fault.goes_on is None and process.child.poll() is not None):
            code = process.wait()
            if code != fault.code and (fault.code is not None or code == 0):
                raise Broken(f"the exit code is {code}, not {fault.code}")
            self._running.clear()
            wait_until(lambda: not self._lab.started(), "processes outlive the server")
        elif process.child.poll() is not None:
            raise Broken(f"the server has ended with {process.child.returncode}: {process.said[-1500:]}")
        self._serve_again(kind)

    def _serve_again(self, kind: str) -> None:
        """Raises Broken unless the server, started again if it has ended, gives the same ids and holds nothing."""
        process = self._server(kind)
        client = self._client(process)
        for body in self._bodies[: self._clients]:
            if (found := client.ids(body.fields)) != body.ids:
                raise Broken(f"other ids afterwards: {found}, not {body.ids}")
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        url = process.wait_for(r"http://127\.0\.0\.1:\d+")[0]

        def left() -> dict[str, float]:
            values = counters(httpx.get(f"{url}/metrics", headers=AUTHORIZED, timeout=PATIENCE_S).text)
            return {name: values[f"headway_{name}"] for name in names if values[f"headway_{name}"]}

        wait_until(lambda: not left(), f"requests or pages are left: {left()}")

    def _server(self, kind: str) -> Process:
        if self._running and self._kind == kind:
            return self._running[0]
        self.stop()
        if not self._bodies:
            self._bodies = self._undisturbed()
        self._kind = kind
        self._running.append(process := self._start(kind))
        return process

    def _start(self, kind: str) -> Process:
        engine = [f"engine.max_batch={MAX_BATCH}", "engine.threads=1", "engine.max_tokens_in_cache=384"]
        server = ["server.port=0", f"server.client_timeout_s={SENDING_S}", "server.drain_s=60"]
        words = [*self._words, *KINDS[kind], *engine, *server, f"output_dir={self._output(kind)}"]
        process = self._lab.start("infer/serve.py", *words)
        try:
            process.wait_for("try: curl")
        except Broken:
            if not (named := re.search(rf"{self._output(kind)}/\S*?(?=[:,;) ]|$)", process.said)):
                raise
            # a head that cannot be read is refused by its name: without it the server starts
            shutil.rmtree(Path(named[0]) if Path(named[0]).is_dir() else Path(named[0]).parent)
            process = self._lab.start("infer/serve.py", *words)
            process.wait_for("try: curl")
        return process

    def _output(self, kind: str) -> Path:
        return self._lab.disk / kind.replace(" ", "-")

    def _client(self, process: Process) -> Client:
        return Client(process.wait_for(r"http://127\.0\.0\.1:\d+")[0])

    def _undisturbed(self) -> list[Body]:
        """Return requests with the ids of a server to which nothing happens, one at a time."""
        random, client = self._lab.random, self._client(process := self._start("server"))
        bodies = list[Body]()
        for number in range(PROMPTS):
            fields = {
                "model": self._model,
                "prompt": f"def {CANARY}_{number}(",
                "max_tokens": random.randint(*LENGTHS),
                "temperature": random.choice((0.0, 0.8)),
                "seed": number,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            bodies.append(Body(fields, client.ids(fields)))
        process.child.terminate()
        process.wait()
        return bodies

    def forget(self) -> None:
        """Start anew after a fault that broke something: all processes have been ended."""
        self._running.clear()

    def stop(self) -> None:
        """End the server as a supervisor would. Raises Broken if it does not end well, or leaves anything."""
        for process in self._running:
            process.child.terminate()
            if code := process.wait():
                raise Broken(f"after SIGTERM the exit code is {code}: {process.said[-1500:]}")
        self._running.clear()
        self._lab.check_nothing_left(*(self._output(kind) for kind in KINDS))
