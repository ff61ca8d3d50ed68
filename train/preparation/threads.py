"""Chooses the number of CPU threads of updates and of features, by measuring, while a run goes on.

Beside other busy processes each thread of a product waits for the others whenever one is descheduled, and two threads
then take many times as long as one. infer/processes/threads.py does the same for the steps of the engine. A different
number of threads may round differently, so a run that changes it is not reproducible bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from tqdm import tqdm

from infer.processes.threads import CLEARLY, FORGETS, SLOW, cpu_threads
from train.config import TrainConfig

T = TypeVar("T")

LOOKS = 2  # timings per number of threads in one look; they alternate
LOOKS_SHARE = 0.03  # of the time, at most, goes into looks
SLOW_WORKS = 3  # so many more slow works than others prompt a look
FIRST_S, SELDOM_S, LONGEST_S = 2.0, 60.0, 900.0  # seconds of work before a look: first, without slow works, maximum


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)


class WorkThreads:
    """The present number of threads, `count`: 1 or `most`.

    Call `record` after each work. When `due`, call `look` with a repeatable work of the usual size.
    """

    def __init__(
        self,
        most: int,
        *,
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.count, self._most, self._clock, self._tell = most, most, clock, tell or say
        self._adaptive = adaptive and most > 1
        self._fastest = 0.0  # seconds per unit of work
        self._slow = 0  # slow works, less the others, but at least 0
        self._since, self._wait = 0.0, FIRST_S  # seconds of work since the last look; until the next
        self._looked = False

    def record(self, size: float, seconds: float) -> None:
        """Record a work of `size` units, such as tokens."""
        pace = seconds / max(size, 1.0)
        self._fastest = min(pace, self._fastest * FORGETS) if self._fastest else pace
        self._slow = self._slow + 1 if pace > SLOW * self._fastest else max(0, self._slow - 1)
        self._since += seconds

    @property
    def due(self) -> bool:
        """Whether it is time to measure again."""
        return (
            self._adaptive
            and self._since >= self._wait
            and (not self._looked or self._slow >= SLOW_WORKS or self._since >= SELDOM_S)
        )

    def look(self, run: Callable[[], object]) -> float:
        """Time `run`, which changes nothing, with one and with all threads; return its seconds with the faster number.

        The present number stays unless the other is clearly faster. Where it cannot change, `run` is timed as it is.
        """
        counts = (1, self._most) if self._adaptive else (self.count,)
        times: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(LOOKS):
            for count in counts:
                with cpu_threads(count):
                    begin = self._clock()
                    run()
                    times[count].append(self._clock() - begin)
        # Sums, not minima: beside busy processes most passes of several threads are fast, and some very slow.
        sums = {count: sum(seconds) for count, seconds in times.items()}
        other = next((count for count in counts if count != self.count), self.count)
        changes = sums[other] < CLEARLY * sums[self.count]
        if changes:
            threads = "1 CPU thread is" if other == 1 else f"{other} CPU threads are"
            self._tell(f"{threads} faster now than {self.count}; sums may round differently from here")
            self.count, self._fastest = other, 0.0
        next_wait = FIRST_S if changes else 2 * self._wait
        self._slow, self._since, self._looked = 0, 0.0, True
        self._wait = max(min(next_wait, LONGEST_S), sum(sums.values()) / LOOKS_SHARE)
        return sums[self.count] / LOOKS

    def timed(self, size: float, work: Callable[[], T]) -> T:
        """Do a repeatable work with the present number of threads and record it; look first if that is due."""
        if self.due:
            self.look(work)
        with cpu_threads(self.count):
            begin = self._clock()
            result = work()
            self.record(size, self._clock() - begin)
        return result


def work_threads(
    config: TrainConfig, device: torch.device, processes: int = 1, tell: Callable[[str], None] | None = None
) -> WorkThreads:
    """Return the threads of a run: `engine.threads`, which fixes them, else torch's, adapted on a single CPU process.

    Several processes keep theirs, since all of them would have to look at the same time.
    """
    fixed, alone = config.engine.threads, processes * config.engine.tensor_parallel == 1
    adaptive = fixed is None and device.type == "cpu" and alone
    return WorkThreads(fixed or torch.get_num_threads(), adaptive=adaptive, tell=tell)
