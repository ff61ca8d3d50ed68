"""Chooses the number of CPU threads of updates and features, by measuring once, before the first of them.

One thread is faster for a small target, and beside a busy process, for which each thread of a product then waits.
infer/processes/threads.py does the same for the steps of the engine. Another number of threads may round differently,
so a run that is resumed with another one is not the same bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from tqdm import tqdm

from infer.processes.threads import CLEARLY, cpu_threads
from train.config import TrainConfig

T = TypeVar("T")

LOOKS = 2  # timings per number of threads; they alternate


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)


class WorkThreads:
    """The number of threads, `count`: `most`, or 1 if a work is clearly faster with one. `due`: not measured yet."""

    def __init__(
        self,
        most: int,
        *,
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.count, self._clock, self._tell = most, clock, tell or say
        self.due = adaptive and most > 1

    def look(self, run: Callable[[], object]) -> float:
        """Time `run`, which changes nothing, with one and with all threads; return its seconds with the faster number.

        Where the number is known, `run` is timed with it alone.
        """
        counts = (1, self.count) if self.due else (self.count,)
        sums = dict.fromkeys(
            counts, 0.0
        )  # not minima: beside busy processes some passes of several threads are very slow
        for _ in range(LOOKS):
            for count in counts:
                with cpu_threads(count):
                    begin = self._clock()
                    run()
                    sums[count] += self._clock() - begin
        if self.due and sums[1] < CLEARLY * sums[self.count]:
            self._tell(f"1 CPU thread is faster than {self.count}")
            self.count = 1
        self.due = False
        return sums[self.count] / LOOKS

    def timed(self, work: Callable[[], T]) -> T:
        """Do a repeatable work with the faster number of threads."""
        if self.due:
            self.look(work)
        with cpu_threads(self.count):
            return work()


def work_threads(
    config: TrainConfig, device: torch.device, processes: int = 1, tell: Callable[[str], None] | None = None
) -> WorkThreads:
    """Return the threads of a run: `engine.threads`, which fixes them, else torch's, measured on a single CPU process.

    Several processes keep theirs, since all of them would have to look at the same time.
    """
    fixed, alone = config.engine.threads, processes * config.engine.tensor_parallel == 1
    adaptive = fixed is None and device.type == "cpu" and alone
    return WorkThreads(fixed or torch.get_num_threads(), adaptive=adaptive, tell=tell)
