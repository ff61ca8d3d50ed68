"""More load than the server can take: excess requests get 429, accepted ones complete, and nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections import Counter
from itertools import islice
from pathlib import Path

import httpx

from infer.config import EngineConfig
from tests.pools import check_pool
from tests.server.harness import MODEL, MakeServer, Server, slow_down, wait_until
from tests.server.soak import SAMPLES, Report, percentiles, read_turns, soak

TOKENS = 24


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def load(server: Server, clients: int, num_requests: int) -> Counter[int]:
    """Run all clients' requests concurrently and return the number of responses by status."""
    statuses: Counter[int] = Counter()

    async def run(client: httpx.AsyncClient, number: int) -> None:
        for turn in range(num_requests):
            body = {"model": MODEL, "prompt": [[1 + number, 1 + turn]], "max_tokens": TOKENS, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            statuses[response.status_code] += 1
            if response.status_code == 200:
                assert response.json()["usage"]["completion_tokens"] == TOKENS
            else:
                assert int(response.headers["retry-after"]) >= 1
                await asyncio.sleep(0.02)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            await asyncio.gather(*(run(client, number) for number in range(clients)))

    asyncio.run(main())
    return statuses


def test_three_times_as_many_as_fit(make_server: MakeServer) -> None:
    with make_server(engine=EngineConfig(max_batch=4), max_waiting=4) as server:
        load(server, 8, 3)  # a warm-up that touches everything once
        before = resident_mb()
        assert set(load(server, 8, 8)) == {200}
        slow_down(server, 0.01)  # without it, clients on a slow machine may arrive one by one
        assert set(load(server, 24, 4)) == {200, 429}
        wait_until(lambda: server.metrics()["headway_kv_cache_usage_perc"] == 0)
        assert resident_mb() - before < 60


def test_a_short_soak(make_server: MakeServer) -> None:
    """A short version of `tests/server/soak.py`, which runs for twenty minutes."""
    with make_server(engine=EngineConfig(max_batch=4), max_waiting=8) as server:
        statuses, hung_up = Counter[int](), 0
        for seed in range(1, 61):
            report = asyncio.run(soak(server.url, seconds=5, clients=10, seed=seed))
            assert report.problems == []
            assert len(report.memory) == SAMPLES
            statuses, hung_up = statuses + report.statuses, hung_up + report.hung_up
            if statuses[200] > 20 and statuses[400] and hung_up:
                break  # all kinds were seen; a slow machine takes longer to get there
        assert statuses[200] > 20
        assert statuses[400]
        assert hung_up
        wait_until(lambda: not server.engine.has_work)
        check_pool(server.engine._pool, [])


def test_conversations_come_back_with_their_history(make_server: MakeServer, talking_target, tmp_path) -> None:
    rows = [
        {"messages": [{"role": role, "content": f"{n} {k}"} for k, role in enumerate(("user", "assistant", "user"))]}
        for n in range(3)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "alone"}]))
    turns = list(islice(read_turns([file], seed=3), 7))
    assert sorted(len(turn) for turn in turns[:4]) == [1] * 4
    assert sorted(len(turn) for turn in turns[4:]) == [3] * 3
    assert all(turn[:1] in turns[:4] for turn in turns[4:])
    with make_server(target=talking_target, proposer="suffix", engine=EngineConfig(max_batch=8)) as server:
        report = asyncio.run(soak(server.url, seconds=4, clients=4, rate=10, turns=read_turns([file], seed=3)))
        assert report.problems == []
        assert report.statuses[200] > 10
        assert len(percentiles(report.first)) == len(percentiles(report.between)) == 3
        assert all(value > 0 for value in percentiles(report.first))


def test_a_leak_is_seen() -> None:
    flat, growing = (
        Report(memory=[500.0 + (n < 5) * 300 for n in range(40)]),
        Report(memory=[500.0] * 30 + [700.0] * 10),
    )
    for report, problems in ((flat, 0), (growing, 1)):
        report.check_growth()
        assert len(report.problems) == problems
