"""Timing of a training step by part, and peak memory.

data        the batch, from memory or disk            time/data, time/target, time/head, time/optimizer:
target      features and the teacher                  seconds of the step, in this process
head        forward and backward
optimizer   communication between processes, and the update
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

PARTS = ("data", "target", "head", "optimizer")


class StepClock:
    """Times one step after another: call `start`, then enter `part` around each part, any number of times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start()

    def start(self) -> None:
        self._start, self._seconds = time.perf_counter(), {part: 0.0 for part in PARTS}

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds[name] += time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()}


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: allocated on the device, or on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, StopIteration):  # Linux's ru_maxrss starts from that of the parent process
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
