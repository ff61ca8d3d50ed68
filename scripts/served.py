"""Measures speed and latency of servers under an open load: requests arrive independently of earlier responses.

    python scripts/served.py model=demo head=eagle3
    python scripts/served.py systems=[server,server:head:auto3,vllm,vllm:head] loads=[0.1,1,3] save=served

One server runs at a time (scripts/peer_servers.py lists them). Arrivals are a Poisson process, the same for every
server. A load of 1 is `capacity` requests per second; its default is what the first server completes with `slots`
requests always in flight. A load lasts `seconds`, and its speed counts the tokens received in that time. Requests still
in flight then have DRAIN_S to finish; the rest are dropped and count with the time they had waited, so percentiles are
lower bounds where many were dropped. The last line of standard output is one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from infer.options.cli import engine_entry_point
from scripts.config import ServedConfig
from scripts.document import describe_machine, result_file, without_folders, write
from scripts.peer_servers import Server, context_of, end_as_interrupted, make_server
from scripts.systems import read_prompts

WARM_UP_S, REST_S, DRAIN_S = 4.0, 0.5, 3.0
SETTINGS = ("loads", "seconds", "slots", "prompt_tokens", "max_tokens", "files")


@dataclass
class RequestTrace:
    """The times of one request, in seconds of the load's clock, and its token counts."""

    due: float
    first: float | None = None  # its first token
    last: float | None = None  # its last token
    tokens: int = 0
    in_time: int = 0  # tokens received while the load lasted
    refused: bool = False


@dataclass
class Level:
    """One server under one load."""

    load: float
    requests_per_s: float  # sent
    tokens_per_s: float  # received while the load lasted
    finished: int
    unfinished: int
    refused: int
    first_token_s: dict[str, float]  # p50 and p90, over all requests sent
    latency_s: dict[str, float]
    token_s: dict[str, float]  # between two tokens of a request


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrival times in seconds of a Poisson process of `rate` per second."""
    source, at, times = random.Random(f"arrivals-{seed}-{rate}"), 0.0, []
    while (at := at + source.expovariate(rate)) < seconds:
        times.append(at)
    return times


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90)} if ordered else {}


class Load:
    """Sends requests to one server. `clock` counts seconds from the start of the current load."""

    def __init__(self, server: Server, config: ServedConfig, prompts: list[list[int]]) -> None:
        self.server, self.config, self.prompts = server, config, prompts
        self.start = time.perf_counter()
        # A new connection for each request: some servers close an idle one just as the next request is sent on it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits)

    @property
    def clock(self) -> float:
        return time.perf_counter() - self.start

    async def ask(self, number: int, heard: RequestTrace) -> None:
        prompt = self.prompts[number % len(self.prompts)]
        body = self.server.body(prompt, self.config.max_tokens, 0.0, self.config.seed) | {"stream": True}
        async with self.client.stream("POST", self.server.endpoint, json=body) as response:
            heard.refused = response.status_code != 200
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if count := len(self.server.ids(json.loads(line[6:]))):
                    now = self.clock
                    heard.first = now if heard.first is None else heard.first
                    heard.tokens, heard.last = heard.tokens + count, now
                    heard.in_time += count if now <= self.config.seconds else 0

    async def open(self, rate: float) -> tuple[list[RequestTrace], float]:
        """Send requests at `rate` per second; return their traces and the time when unfinished ones were dropped."""
        self.start = time.perf_counter()
        all_heard, running = list[RequestTrace](), list[asyncio.Task[None]]()
        for number, due in enumerate(arrivals(rate, self.config.seconds, self.config.seed)):
            await asyncio.sleep(max(0.0, due - self.clock))
            all_heard.append(RequestTrace(due))
            running.append(asyncio.create_task(self.ask(number, all_heard[-1])))
        await asyncio.sleep(max(0.0, self.config.seconds - self.clock))
        if running:
            await asyncio.wait(running, timeout=DRAIN_S)
        return all_heard, await self._end(running)

    async def closed(self, seconds: float) -> float:
        """Return the requests per second that the server completes with `slots` of them always in flight.

        Lasts until one is complete, however slow the server is. Raises ValueError if it refuses one.
        """
        self.start = time.perf_counter()
        answered = list[RequestTrace]()

        async def user(number: int) -> None:
            while True:
                heard = RequestTrace(self.clock)
                await self.ask(number, heard)
                if heard.refused:
                    raise ValueError(f"systems: {self.server.name}: refuses a request; see {self.server.log}")
                answered.append(heard)
                number += self.config.slots

        users = [asyncio.create_task(user(number)) for number in range(self.config.slots)]
        await asyncio.wait(users, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        while not answered and not any(task.done() for task in users):
            await asyncio.sleep(0.05)
        end = await self._end(users)
        for task in users:
            if not task.cancelled() and (error := task.exception()):
                raise error
        return sum(heard.tokens for heard in answered) / self.config.max_tokens / end

    async def _end(self, running: list[asyncio.Task[None]]) -> float:
        """Cancel the requests in flight, wait for a free slot of the server and return the time of the cancellation."""
        end = self.clock
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.ask(0, RequestTrace(0.0))  # completes only once the server has a free slot again
        await asyncio.sleep(REST_S)
        return end


def summary(load: float, all_heard: list[RequestTrace], seconds: float, end: float, max_tokens: int) -> Level:
    """Summarise a load that lasted `seconds`; unfinished requests were dropped at the time `end`."""
    done = [heard for heard in all_heard if heard.tokens >= max_tokens]
    several = [heard for heard in all_heard if heard.tokens > 1]
    return Level(
        load=load,
        requests_per_s=len(all_heard) / seconds,
        tokens_per_s=sum(heard.in_time for heard in all_heard) / seconds,
        finished=len(done),
        unfinished=len(all_heard) - len(done),
        refused=sum(heard.refused for heard in all_heard),
        first_token_s=percentiles([(end if heard.first is None else heard.first) - heard.due for heard in all_heard]),
        latency_s=percentiles(
            [((heard.last or end) if heard.tokens >= max_tokens else end) - heard.due for heard in all_heard]
        ),
        token_s=percentiles([((h.last or 0.0) - (h.first or 0.0)) / (h.tokens - 1) for h in several]),
    )


async def measure(server: Server, config: ServedConfig, prompts: list[list[int]], capacity: float | None) -> Any:
    """Return the levels of one server, and the capacity in requests per second that their loads are multiples of."""
    load = Load(server, config, prompts)
    async with load.client:
        await load.closed(min(WARM_UP_S, config.seconds))
        capacity = capacity or await load.closed(config.seconds)
        levels = []
        for share in config.loads:
            all_heard, end = await load.open(share * capacity)
            levels.append(summary(share, all_heard, config.seconds, end, config.max_tokens))
            show(server.name, levels[-1])
        return levels, capacity


def show(name: str, level: Level) -> None:
    values = (level.first_token_s, level.latency_s, level.token_s)
    first, latency, token = (quantiles.get("p50", 0.0) for quantiles in values)
    print(
        f"{name:24} load {level.load:<4g} {level.requests_per_s:6.2f} requests/s {level.tokens_per_s:7.1f} tokens/s; "
        f"medians: first token {first:.3f} s, token {1000 * token:.1f} ms, whole {latency:.2f} s; "
        f"{level.unfinished} of {level.finished + level.unfinished} unfinished, {level.refused} refused",
        flush=True,
    )


def earlier(file: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Return the systems already in `file`. Raises ValueError if it was measured with other settings."""
    if not file.is_file():
        return {}
    before = json.loads(file.read_text(encoding="utf-8"))
    for key in ("target", "settings", "capacity"):
        if before[key] != document[key]:
            raise ValueError(f"save={document['name']}: {file.name} was measured with another {key}: {before[key]}")
    return before["results"]


@engine_entry_point("served", ServedConfig)
def main(config: ServedConfig) -> None:
    prompts = read_prompts(config)
    from infer.options.devices import dtype_name
    from models.checkpoint import fingerprint
    from models.targets import resolve_checkpoint

    folder = resolve_checkpoint(config.model.path_or_hub_id, config.model.revision)
    end_as_interrupted()
    capacity = config.capacity
    document: dict[str, Any] = {
        "name": config.save,
        "machine": describe_machine(),
        "target": {"fingerprint": fingerprint(folder), "dtype": dtype_name(config.model)},
        "settings": without_folders({key: getattr(config, key) for key in SETTINGS}),
        "capacity": capacity,
        "results": {},
    }
    for name in config.systems:
        context = context_of(config.prompt_tokens, config.max_tokens)
        with make_server(name, config, slots=config.slots, context=context) as server:
            levels, capacity = asyncio.run(measure(server, config, prompts, capacity))
        document["capacity"] = capacity
        document["results"][name] = [asdict(level) for level in levels]
        if config.save is not None:
            file = result_file(config.save, config.model.name, document["machine"])
            document["results"] = earlier(file, document) | document["results"]
            write(document, config.save, config.model.name)
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
