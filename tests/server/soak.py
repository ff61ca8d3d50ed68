"""Soak-tests a running server with random requests and checks for 5xx responses, incomplete streams and leaks.

    python -m tests.server.soak http://127.0.0.1:8000 --minutes 20
    python -m tests.server.soak http://127.0.0.1:8000 --minutes 60 --rate 2.8 --conversations prompts.jsonl

Requests use the completions, chat completions and responses APIs; some are streamed, some are disconnected midway, and
some have stop strings, grammars, several choices or invalid values. Texts are random words, or the turns of
conversations, whose rows hold messages, a prompt or a question; of several conversations a turn is taken in turn, so
that each comes back with its history. Clients ask again as soon as they are answered, or with --rate so many a second
come in a Poisson process, whoever waits. Prints a summary with percentiles of what streams waited for, and one line of
JSON; the exit code is 1 if there was a problem. An API key is read from HEADWAY_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from train.data.sources import read_file

WORDS = ["def", "return", "import", "class", "for", "while", "x", "y", "(", ")", ":", "=", "1", "2", "é", "日", "\n"]
STRUCTURES: list[dict[str, Any]] = [
    {"choice": ["yes", "no", "perhaps"]},
    {"regex": "[a-f0-9]{4,12}"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json_object": True},
]
MISTAKES: list[dict[str, Any]] = [  # invalid at every endpoint
    {"temperature": -1},
    {"top_p": 2},
    {"seed": -2},
    {"moderation": {"model": "m"}},
    {"structured_outputs": {"regex": "("}},
    {"speculative": {"proposer": "oracle"}},
]
ENDS = ("data: [DONE]", "response.completed", "response.incomplete", '"code":"grammar_failed"')
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
REFUSALS = (429, 503)
TEXTS = b'"content":"', b'"text":"', b"output_text.delta"  # of events that bring text
SAMPLES = 40  # of the server's memory and open files, evenly over the whole run
OPEN = 16  # conversations that take turns
PERCENTILES = 50, 95, 99
GROWTH = 1.1, 128.0  # a leak: memory grows by more than this factor plus these MiB from the second quarter to the last


@dataclass
class Report:
    statuses: Counter[int] = field(default_factory=Counter)
    hung_up: int = 0
    problems: list[str] = field(default_factory=list)
    tokens: float = 0.0
    memory: list[float] = field(default_factory=list)  # MiB, at even intervals
    files: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds until the first event with text of a whole stream
    between: list[float] = field(default_factory=list)  # between its events

    def check_growth(self) -> None:
        """Add a problem if memory grew from the second quarter of the run to the last; the first is warm-up."""
        quarter = len(self.memory) // 4
        if quarter == 0:
            return
        before, after = self.quarters()
        if after > before * GROWTH[0] + GROWTH[1]:
            self.problems.append(f"memory grew from {before:.0f} to {after:.0f} MiB")

    def quarters(self) -> tuple[float, float]:
        """Return the most memory in the second quarter of the run and in the last."""
        quarter = len(self.memory) // 4
        before, after = (max(self.memory[part]) for part in (slice(quarter, 2 * quarter), slice(-quarter, None)))
        return before, after


def read_turns(files: Sequence[Path], seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield the messages up to each turn of a user, without end; conversations come in another order each time."""
    rows = [row for file in files for item in read_file(file) if isinstance(row := item.row, dict)]
    asked_of = ({"role": "user", "content": row.get("prompt") or row.get("question")} for row in rows)
    chats = [row.get("messages") or [alone] for row, alone in zip(rows, asked_of, strict=True)]
    random_ = random.Random(seed)
    while True:
        random_.shuffle(chats)
        for start in range(0, len(chats), OPEN):
            asked = (
                [chat[: place + 1] for place, message in enumerate(chat) if message["role"] == "user"]
                for chat in chats[start : start + OPEN]
            )
            yield from (turn for turns in zip_longest(*asked) for turn in turns if turn is not None)


def request(
    random_: random.Random, model: str, turn: list[dict[str, str]] | None = None
) -> tuple[str, dict[str, Any], bool]:
    """Return a random path and body, with the turn's messages, and whether the request is invalid."""
    text = " ".join(random_.choices(WORDS, k=random_.randint(1, 60))) if turn is None else turn[-1]["content"]
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": random_.choice((1, 4, 16, 64) if turn is None else (32, 64, 128)),
        "temperature": random_.choice((0, 0.7, 1.5 if turn is None else 1.0)),
        "stream": random_.random() < 0.5,
    }
    options: list[dict[str, Any]] = [
        {"stop": random_.sample(["e", "\n", "return", "1"], 2)},
        {"top_k": 5, "top_p": 0.9},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"structured_outputs": random_.choice(STRUCTURES)},
        {"speculative": {"enabled": False}},
        {"priority": random_.randint(-2, 2)},
        {},
    ]
    body |= random_.choice(options)
    wrong = random_.random() < 0.1
    if wrong:
        body |= random_.choice(MISTAKES)
    kind = random_.choice(("completions", "chat/completions", "responses"))
    if kind == "chat/completions":
        return f"/v1/{kind}", body | {"messages": turn or [{"role": "user", "content": text}]}, wrong
    if kind == "completions":
        if body.pop("top_logprobs", None):
            body["logprobs"] = 2
        return f"/v1/{kind}", body | {"prompt": text}, wrong
    for name in ("n", "logprobs"):
        body.pop(name, None)
    body["max_output_tokens"] = body.pop("max_tokens")
    return f"/v1/{kind}", body | {"input": turn or text}, wrong


async def send(
    client: httpx.AsyncClient,
    random_: random.Random,
    model: str,
    report: Report,
    turn: list[dict[str, str]] | None = None,
) -> None:
    path, body, wrong = request(random_, model, turn)
    begin, events = time.monotonic(), list[float]()
    patience = random_.choice((1, 3, None, None, None)) if body["stream"] else None
    async with client.stream("POST", path, json=body) as response:
        report.statuses[response.status_code] += 1
        if response.status_code == 200 and patience is not None:
            pieces = response.aiter_text()
            for _ in range(patience):
                if await anext(pieces, None) is None:
                    return
            report.hung_up += 1
            return
        pieces = [piece async for piece in timed(response, events)]
    text = b"".join(pieces).decode()
    status = response.status_code
    if status >= 500 and status not in REFUSALS:
        report.problems.append(f"{path}: {status}: {text[:200]}")
    elif status == 200 and wrong:
        report.problems.append(f"{path}: took {body}")
    elif status in REFUSALS:
        if "retry-after" not in response.headers:
            report.problems.append(f"{status} without Retry-After")
        await asyncio.sleep(random_.random() / 10)
    elif status != 200:
        if set(json.loads(text)) != {"error"}:
            report.problems.append(f"{path}: {status} not in OpenAI's shape: {text[:200]}")
    elif body["stream"] and not any(end in text for end in ENDS):
        report.problems.append(f"{path}: a stream that does not end: {text[-200:]}")
    elif body["stream"] and events:
        report.first.append(events[0] - begin)
        report.between += [after - before for before, after in pairwise(events)]


async def timed(response: httpx.Response, events: list[float]) -> AsyncIterator[bytes]:
    """Yield the body in pieces, and add to `events` when each came that brings text of a stream."""
    async for piece in response.aiter_raw():
        events += [time.monotonic()] * any(name in piece for name in TEXTS)
        yield piece


async def soak(
    url: str,
    *,
    seconds: float,
    clients: int,
    seed: int = 0,
    key: str | None = None,
    rate: float | None = None,
    turns: Iterator[list[dict[str, str]]] | None = None,
) -> Report:
    """Send requests for `seconds`, wait for those in flight and return the report.

    They come from `clients` concurrent clients, or `rate` a second. `turns`: their messages, else random words.
    """
    report, end = Report(), time.monotonic() + seconds
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]

        async def ask(random_: random.Random) -> None:
            try:
                await send(client, random_, model, report, None if turns is None else next(turns))
            except httpx.HTTPError as error:
                report.problems.append(f"connection: {error!r}")
                await asyncio.sleep(0.2)

        async def run(number: int) -> None:
            random_ = random.Random(seed * 1000 + number)
            while time.monotonic() < end:
                await ask(random_)

        async def arrive(rate: float) -> None:
            random_ = random.Random(seed)
            async with asyncio.TaskGroup() as tasks:
                while time.monotonic() < end:
                    tasks.create_task(ask(random.Random(random_.random())))
                    await asyncio.sleep(random_.expovariate(rate))

        async def watch() -> None:
            for _ in range(SAMPLES):
                samples = await counters(client)
                report.memory.append(samples["process_resident_memory_bytes"] / 2**20)
                report.files.append(samples["process_open_fds"])
                await asyncio.sleep(seconds / SAMPLES)

        await asyncio.gather(watch(), *([arrive(rate)] if rate else [run(number) for number in range(clients)]))
        await settle(client, report)
    report.check_growth()
    return report


async def counters(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the values of /metrics by name, without labels."""
    lines = (await client.get("/metrics")).raise_for_status().text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in pairs}


async def settle(client: httpx.AsyncClient, report: Report) -> None:
    """Check that without requests nothing is left running or waiting and no KV cache is in use."""
    for _ in range(100):
        samples = await counters(client)
        report.tokens = samples["headway_generation_tokens_total"]
        leftover = {name: samples[f"headway_{name}"] for name in IDLE}
        if not any(leftover.values()):
            return
        await asyncio.sleep(0.1)
    report.problems.append(f"left over: {leftover}")


def percentiles(values: Sequence[float]) -> list[float]:
    """Return the values at PERCENTILES, none for fewer than two values."""
    if len(values) < 2:
        return []
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return [cuts[percent - 1] for percent in PERCENTILES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="requests a second, in place of clients that wait for answers")
    parser.add_argument("--conversations", type=Path, nargs="+", default=[], help="files in JSON Lines")
    arguments = parser.parse_args()
    host = urlsplit(arguments.url).hostname or ""
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        parser.error(f"{arguments.url}: only a server on this machine, by its loopback address")
    key = os.environ.get("HEADWAY_API_KEY")
    seconds = 60 * arguments.minutes
    turns = read_turns(arguments.conversations, arguments.seed) if arguments.conversations else None
    sent = {"clients": arguments.clients, "seed": arguments.seed, "rate": arguments.rate, "turns": turns}
    report = asyncio.run(soak(arguments.url, seconds=seconds, key=key, **sent))
    print(f"answers {dict(sorted(report.statuses.items()))}, hung up {report.hung_up}, tokens {report.tokens:.0f}")
    for name, samples in (("memory in MiB", report.memory), ("open files", report.files)):
        print(f"{name}, at even intervals: {', '.join(f'{value:.0f}' for value in samples[:: SAMPLES // 10])}")
    before, after = report.quarters()
    print(f"most memory in the last quarter: {after / before:.3f} of that in the second")
    waits = {"first text": percentiles(report.first), "between events": percentiles(report.between)}
    for name, values in waits.items():
        print(f"{name} of whole streams, ms at p50, p95, p99: {', '.join(f'{1e3 * value:.0f}' for value in values)}")
    for problem in report.problems[:20]:
        print(f"  {problem}")
    document = {"statuses": report.statuses, "hung_up": report.hung_up, "problems": len(report.problems)}
    document |= {
        "tokens": report.tokens,
        "seconds": seconds,
        "memory_mib": report.memory,
        "files": report.files,
        **waits,
    }
    print(json.dumps(document))
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main())
