"""How many CPU threads a step should use: on a small target a second thread costs more in waiting than it computes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infer.config import EngineConfig
from infer.shard import Shard
from kernels.linear import PackedLinear

REPEATS = 5
MANY_ROWS = 16


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """torch's threads within the block; restored after it, for whoever shares the process (a trainer)."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fastest_thread_count(linears: Sequence[PackedLinear], rows: int, dtype: torch.dtype) -> int:
    """Times a step's linear layers on `rows` rows, cold as in a step, with one thread and with all of torch's."""
    available = torch.get_num_threads()
    inputs = {linear.in_features: torch.ones(rows, linear.in_features, dtype=dtype) for linear in linears}
    best: dict[int, float] = {}
    for count in {1, available}:
        with cpu_threads(count):
            for _ in range(REPEATS):
                begin = time.perf_counter()
                for linear in linears:
                    linear(inputs[linear.in_features])
                best[count] = min(best.get(count, float("inf")), time.perf_counter() - begin)
    return min(best, key=lambda count: best[count])


@dataclass(frozen=True)
class ThreadPlan:
    """Threads for steps of few rows and of many. Both give a row the same bits, which the engine's probes assert."""

    few: int
    many: int

    @classmethod
    def measure(cls, linears: Sequence[PackedLinear], dtype: torch.dtype) -> ThreadPlan:
        return cls(*(fastest_thread_count(linears, rows, dtype) for rows in (2, MANY_ROWS)))

    def count(self, rows: int) -> int:
        return self.many if rows >= MANY_ROWS else self.few


def plan_threads(config: EngineConfig, shard: Shard) -> ThreadPlan:
    """As configured, else as measured. Ranks compute at the same time: each has its share of the threads."""
    if config.tensor_parallel == 1 and config.threads is None and shard.device.type == "cpu":
        return ThreadPlan.measure(shard.linears, shard.dtype)
    own = max(1, (config.threads or torch.get_num_threads()) // config.tensor_parallel)
    return ThreadPlan(own, own)
