"""Timing of a training step by part, peak memory, and the FLOPs that a step needs for its head.

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
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from infer.devices import free_bytes
from infer.options.environment import process_bytes
from models.heads.base import Head
from models.heads.weights import dtype_of
from train.objectives.draft_states import draft_states

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
    with suppress(OSError):  # Linux's ru_maxrss starts from that of the parent process
        return process_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def limited_memory(device: torch.device) -> Iterator[None]:
    """On Linux's CPUs let allocations beyond the memory that is free now fail, for which it would kill the process."""
    free, limits = free_bytes(device), resource.getrlimit(resource.RLIMIT_DATA)
    if free is not None and device.type != "cuda":
        lowest = min([process_bytes("VmData") + free, *(limit for limit in limits if limit != resource.RLIM_INFINITY)])
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


WITH_BACKWARD = 3  # forward, gradient of the input, gradient of the weight


class HeadFlops(NamedTuple):
    per_token: float  # states of depth 0, and of a block drafter's blocks
    per_slot: float  # logits of one slot that is compared with the teacher, and its state at later depths, on average

    def step(self, tokens: float, slots: float) -> float:
        """Return the FLOPs of a step; `slots` is summed over all depths."""
        return self.per_token * tokens + self.per_slot * slots


@torch.no_grad()
def head_flops(head: Head, steps: int) -> HeadFlops:
    """Count the head's FLOPs by running a single token through it; its parameters must not be sharded.

    Divided by time and peak FLOP/s they are the model FLOPs utilisation (MFU). The matrix products of a forward on real
    tokens count, times three to include the backward pass; anything beyond (padding, recomputed logits) does not.
    """
    device = next(head.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    feature = torch.zeros(1, 1, head.config.target_hidden_size, dtype=dtype_of(head), device=device)
    aux = [feature] * len(head.config.aux_layers)
    states = draft_states(head, ids, aux, steps)
    with FlopCounterMode(display=False) as of_token:
        first = next(states)
    with FlopCounterMode(display=False) as of_slots:
        for depth, state in enumerate((first, *states)):
            head.logits(state, depth)
    return HeadFlops(WITH_BACKWARD * of_token.get_total_flops(), WITH_BACKWARD * of_slots.get_total_flops() / steps)
