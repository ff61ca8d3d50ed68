"""How many CPU threads a step should use: on a small target a second thread costs more in waiting than it computes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kernels.linear import PackedLinear

REPEATS = 5


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


def fastest_thread_count(linears: Sequence[PackedLinear], dtype: torch.dtype) -> int:
    """Times a plain step's linear layers, cold as they are in a step, with one thread and with all of torch's.

    Changes speed only: the start-up probes assert that rows keep their bits, and they run under the chosen count.
    """
    available = torch.get_num_threads()
    inputs = {linear.in_features: torch.ones(2, linear.in_features, dtype=dtype) for linear in linears}
    best: dict[int, float] = {}
    for count in {1, available}:
        with cpu_threads(count):
            for _ in range(REPEATS):
                begin = time.perf_counter()
                for linear in linears:
                    linear(inputs[linear.in_features])
                best[count] = min(best.get(count, float("inf")), time.perf_counter() - begin)
    return min(best, key=lambda count: best[count])
