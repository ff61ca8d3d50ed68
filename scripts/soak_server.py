"""Soak-tests a running server with random requests and checks for 5xx responses, incomplete streams and leaks.

    python scripts/soak_server.py http://127.0.0.1:8000 --minutes 20

Requests use the completions, chat completions and responses APIs; some are streamed, some are disconnected midway, and
some have stop strings, grammars, several choices or invalid values. Prints a summary and one line of JSON; the exit
code is 1 if there was a problem. An API key is read from HEADWAY_API_KEY.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import argparse
import asyncio
import ipaddress
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

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
SAMPLES = 40  # of the server's memory and open files, evenly over the whole run
GROWTH = 1.1, 128.0  # a leak: memory grows by more than this factor plus these MiB from the second quarter to the last


@dataclass
class Report:
    statuses: Counter[int] = field(default_factory=Counter)
    hung_up: int = 0
    problems: list[str] = field(default_factory=list)
    tokens: float = 0.0
    memory: list[float] = field(default_factory=list)  # MiB, at even intervals
    files: list[float] = field(default_factory=list)

    def check_growth(self) -> None:
        """Add a problem if memory grew from the second quarter of the run to the last; the first is warm-up."""
        quarter = len(self.memory) // 4
        if quarter == 0:
            return
        before, after = (max(self.memory[part]) for part in (slice(quarter, 2 * quarter), slice(-quarter, None)))
        if after > before * GROWTH[0] + GROWTH[1]:
            self.problems.append(f"memory grew from {before:.0f} to {after:.0f} MiB")


def request(random_: random.Random, model: str) -> tuple[str, dict[str, Any], bool]:
    """Return a random path and body, and whether the request is invalid."""
    text = " ".join(random_.choices(WORDS, k=random_.randint(1, 60)))
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": random_.choice((1, 4, 16, 64)),
        "temperature": random_.choice((0, 0.7, 1.5)),
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
        return f"/v1/{kind}", body | {"messages": [{"role": "user", "content": text}]}, wrong
    if kind == "completions":
        if body.pop("top_logprobs", None):
            body["logprobs"] = 2
        return f"/v1/{kind}", body | {"prompt": text}, wrong
    for name in ("n", "logprobs"):
        body.pop(name, None)
    body["max_output_tokens"] = body.pop("max_tokens")
    return f"/v1/{kind}", body | {"input": text}, wrong


async def send(client: httpx.AsyncClient, random_: random.Random, model: str, report: Report) -> None:
    path, body, wrong = request(random_, model)
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
        text = (await response.aread()).decode()
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


async def soak(url: str, *, seconds: float, clients: int, seed: int = 0, key: str | None = None) -> Report:
    """Send requests from `clients` concurrent clients for `seconds`, wait for those in flight and return the report."""
    report, end = Report(), time.monotonic() + seconds
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]

        async def run(number: int) -> None:
            random_ = random.Random(seed * 1000 + number)
            while time.monotonic() < end:
                try:
                    await send(client, random_, model, report)
                except httpx.HTTPError as error:
                    report.problems.append(f"connection: {error!r}")
                    await asyncio.sleep(0.2)

        async def watch() -> None:
            for _ in range(SAMPLES):
                samples = await counters(client)
                report.memory.append(samples["process_resident_memory_bytes"] / 2**20)
                report.files.append(samples["process_open_fds"])
                await asyncio.sleep(seconds / SAMPLES)

        await asyncio.gather(watch(), *(run(number) for number in range(clients)))
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    host = urlsplit(arguments.url).hostname or ""
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        parser.error(f"{arguments.url}: only a server on this machine, by its loopback address")
    key = os.environ.get("HEADWAY_API_KEY")
    seconds = 60 * arguments.minutes
    report = asyncio.run(soak(arguments.url, seconds=seconds, clients=arguments.clients, seed=arguments.seed, key=key))
    print(f"answers {dict(sorted(report.statuses.items()))}, hung up {report.hung_up}, tokens {report.tokens:.0f}")
    for name, samples in (("memory in MiB", report.memory), ("open files", report.files)):
        print(f"{name}, at even intervals: {', '.join(f'{value:.0f}' for value in samples[:: SAMPLES // 10])}")
    for problem in report.problems[:20]:
        print(f"  {problem}")
    document = {"statuses": report.statuses, "hung_up": report.hung_up, "problems": len(report.problems)}
    document |= {"tokens": report.tokens, "seconds": seconds, "memory_mib": report.memory, "files": report.files}
    print(json.dumps(document))
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main())
