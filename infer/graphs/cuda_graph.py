"""CUDA graphs: a computation on tensors that stay where they are, recorded once and replayed by one launch.

Whoever records says which sizes (`Buckets`); a step is padded up to the next one, and what fits none runs as before.
Without a GPU a replay calls the computation, on the same tensors: padding and copying can be tested anywhere.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from tqdm import tqdm

T = TypeVar("T")


@dataclass(frozen=True)
class Buckets:
    """Sizes that are recorded: requests, and rows of each, ascending; `most` rows in all and `longest` keys of one."""

    batches: tuple[int, ...]
    rows: tuple[int, ...]
    most: int
    longest: int

    def fit(self, requests: int, rows: int) -> tuple[int, int] | None:
        """The smallest sizes that hold as many requests of as many rows; None if there are none."""
        batch, width = at_least(self.batches, requests), at_least(self.rows, rows)
        return None if batch is None or width is None or batch * width > self.most else (batch, width)

    def all(self) -> list[tuple[int, int]]:
        """Largest first, so that the smaller ones find room in the memory of those before."""
        pairs = [(batch, rows) for batch in self.batches for rows in self.rows if batch * rows <= self.most]
        return sorted(pairs, key=lambda pair: -pair[0] * pair[1])


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """The first of ascending `sizes` that is not below `wanted`."""
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself."""
    return tuple(sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power < most)}))


class Graph(Generic[T]):
    """`run` recorded, if there is a GPU. What it answers is valid until any graph of the same memory is replayed.

    What it answers keeps its room for good: large tensors belong in buffers that graphs share.
    """

    def __init__(self, run: Callable[[], T], memory: GraphMemory) -> None:
        self._run: Callable[[], T] | None = run
        self._recorded: torch.cuda.CUDAGraph | None = None
        if memory.pool is None:
            return
        stream, current = torch.cuda.Stream(memory.device), torch.cuda.current_stream(memory.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()  # compiles kernels and makes tables, which cannot be recorded
        current.wait_stream(stream)
        self._recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._recorded, pool=memory.pool, capture_error_mode="thread_local"):
            self._answer = run()
        self._run = None  # what it closes over may hold this graph, whose memory would then outlast its owner

    def __call__(self) -> T:
        if self._recorded is None:
            assert self._run is not None
            return self._run()
        self._recorded.replay()
        return self._answer


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Whatever is garbage is collected before, and nothing meanwhile: a graph that ends while another one is recorded
    spoils that one.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphMemory:
    """What graphs of one engine share: of their intermediate results and answers one is valid at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._before = self._reserved()

    @torch.inference_mode()
    def record(self, work: Iterable[Callable[[], object]], name: str) -> int:
        """Does `work`, each a recording, with a progress bar. The bytes taken of the GPU since this was made, or 0."""
        with nothing_collected():
            for record in tqdm(list(work), desc=f"recording graphs of {name}", unit="graph", disable=None, leave=False):
                record()
        return self._reserved() - self._before

    def _reserved(self) -> int:
        if self.pool is None:
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # as recording does: what was only kept for later is not counted
        return torch.cuda.memory_reserved(self.device)
