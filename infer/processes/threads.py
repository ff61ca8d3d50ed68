"""Chooses the number of CPU threads of a step.

On a small target, and on a busy machine with any target, a second thread costs more in waiting than it saves.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch

from infer.config import EngineConfig
from infer.processes.target_worker import Shard
from kernels.linear import PackedLinear

log = logging.getLogger(__name__)

FEW_ROWS, MANY_ROWS = 2, 16
REPEATS = {FEW_ROWS: 3, MANY_ROWS: 2}  # of each timing at start-up
SLOW, SLOW_STEPS = 2.0, 8  # a step is slow from so many times the fastest; so many slow steps prompt a look
FORGETS = 1.001  # factor by which the fastest time grows with every step, since contexts get longer
MIN_LOOKS, LOOKS, LOOKS_SHARE = 3, 12, 0.01  # least and most timings per thread count; share of time they take
LOOK_S = 0.1  # seconds of timings that are enough, and more than the scheduler's ticks: meanwhile every stream waits
SAMPLE_BYTES = 2**27  # of weights in a timing; few caches hold as much
CLEARLY = 0.8  # another thread count replaces the present one below this share of its time
PLAINLY = 4.0  # if one count is so many times slower than the other, MIN_LOOKS timings are enough too
FIRST_S, SELDOM_S, LONGEST_S = 1.0, 10.0, 60.0  # seconds of steps before a look: first, without slow steps, maximum


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Set torch's thread count inside the block; it is restored for others in the process (a trainer)."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Pass = Callable[[int, int], float]  # seconds of a step's linear layers on so many rows, with so many threads


def timed_pass(linears: Sequence[PackedLinear], dtype: torch.dtype, clock: Callable[[], float]) -> Pass:
    """Return a timer of linear layers. Weights are cold, as in a step: each layer evicts the next one's.

    Of a large target it takes some, chosen at random: all would make a start or a stream wait for seconds.
    """
    shuffled = random.Random(0).sample(linears, len(linears))
    sizes = accumulate(linear.bytes for linear in shuffled)
    linears = [linear for linear, size in zip(shuffled, sizes, strict=True) if size <= SAMPLE_BYTES] or shuffled[:1]

    def run(rows: int, count: int) -> float:
        inputs = {linear.in_features: torch.ones(rows, linear.in_features, dtype=dtype) for linear in linears}
        with cpu_threads(count):
            begin = clock()
            for linear in linears:
                linear(inputs[linear.in_features])
            return clock() - begin

    return run


@dataclass(frozen=True)
class ThreadPlan:
    """Thread counts for steps of few and of many rows. Both give a row the same bits; the engine's probes check it."""

    few: int
    many: int

    @classmethod
    def measure(cls, run: Pass, max_threads: int) -> ThreadPlan:
        """Choose one thread where it is clearly faster than `max_threads`, from which more rows would gain."""

        def choose(rows: int) -> int:
            times = {count: min(run(rows, count) for _ in range(REPEATS[rows])) for count in {1, max_threads}}
            return 1 if times[1] < CLEARLY * times[max_threads] else max_threads

        return cls(choose(FEW_ROWS), choose(MANY_ROWS))

    def count(self, rows: int) -> int:
        return self.many if rows >= MANY_ROWS else self.few


class Threads:
    """A thread plan that adapts to the load of the machine.

    Beside other busy processes, each of two threads waits for the other whenever that one is descheduled, and a step
    takes many times as long. When steps are several times slower than the fastest with as many rows, and occasionally
    otherwise, one thread and `max_threads` are timed again in alternation; the plan changes if the other count is
    clearly faster. This takes at most LOOKS_SHARE of the time. `admit(count)` returns whether `count` threads give the
    same bits.
    """

    def __init__(self, plan: ThreadPlan, run: Pass | None = None, max_threads: int = 1) -> None:
        """Without `run` the plan never changes."""
        self.plan, self._run, self._max_threads = plan, run, max_threads
        self.admit: Callable[[int], bool] = lambda count: True
        self._fastest: dict[int, float] = {}  # seconds of the fastest step, by its rows
        self._slow = 0  # slow steps, less the others, but at least 0
        self._since, self._wait = 0.0, FIRST_S  # seconds of steps since the last look; until the next

    def record_step(self, rows: int, seconds: float) -> None:
        """Record a step; time the thread counts again if that is due."""
        if self._run is None or self._max_threads == 1:
            return
        fastest = self._fastest[rows] = min(seconds, self._fastest.get(rows, seconds) * FORGETS)
        self._slow = self._slow + 1 if seconds > SLOW * fastest else max(0, self._slow - 1)
        self._since += seconds
        if self._since >= self._wait and (self._slow >= SLOW_STEPS or self._since >= SELDOM_S):
            self._look(self._run)

    def _look(self, run: Pass) -> None:
        before, taken = self.plan, 0.0
        counts: list[int] = []
        for rows in (FEW_ROWS, MANY_ROWS):
            # Sums, not medians: beside busy processes most passes of several threads are fast, and some very slow.
            times = {1: 0.0, self._max_threads: 0.0}
            for looks in range(1, LOOKS + 1):
                for count in times:
                    times[count] += run(rows, count)
                enough = sum(times.values()) > LOOK_S or max(times.values()) > PLAINLY * min(times.values())
                if looks >= MIN_LOOKS and enough:
                    break
            taken += sum(times.values())
            present = self.plan.count(rows)
            other = 1 if present == self._max_threads else self._max_threads
            faster = times[other] < CLEARLY * times[present]
            counts.append(other if faster and self.admit(other) else present)
        self.plan = ThreadPlan(*counts)
        if self.plan != before:
            self._fastest.clear()
            log.info("CPU threads per step: %d for few rows, %d for many rows", *counts)
        next_wait = FIRST_S if self.plan != before else 2 * self._wait
        self._slow, self._since, self._wait = 0, 0.0, max(min(next_wait, LONGEST_S), taken / LOOKS_SHARE)


def plan_threads(config: EngineConfig, shard: Shard, clock: Callable[[], float] = time.perf_counter) -> Threads:
    """Return the configured threads, else a measured plan. Each rank gets a share, since all compute at once."""
    if config.tensor_parallel == 1 and config.threads is None and shard.device.type == "cpu":
        run, max_threads = timed_pass(shard.linears, shard.dtype, clock), torch.get_num_threads()
        return Threads(ThreadPlan.measure(run, max_threads), run, max_threads)
    share = max(1, (config.threads or torch.get_num_threads()) // config.tensor_parallel)
    return Threads(ThreadPlan(share, share))
