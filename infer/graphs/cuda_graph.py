"""CUDA graphs: a computation on static tensors, captured once and replayed by one launch.

The caller pads its tensors to a captured size. Without a GPU a replay calls the computation on the same tensors, so
padding and copying can be tested anywhere.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from tqdm import tqdm

T = TypeVar("T")


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the first of the ascending `sizes` that is at least `wanted`; None if there is none."""
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def doubling(most: int) -> tuple[int, ...]:
    """Return the powers of two below `most`, and `most` itself."""
    return tuple(sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power < most)}))


def every_second(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return every second of the ascending `sizes`, and the last."""
    return (*sizes[:-1:2], *sizes[-1:])


class Graph(Generic[T]):
    """Capture of `run`, if there is a GPU. Outputs are valid until any graph of the same memory is replayed.

    Outputs stay allocated as long as the graph exists: write large tensors to buffers that graphs share instead.
    """

    def __init__(self, run: Callable[[], T], memory: GraphMemory) -> None:
        self._run: Callable[[], T] | None = run
        self._recorded: torch.cuda.CUDAGraph | None = None
        if memory.pool is None:
            return
        stream, current = torch.cuda.Stream(memory.device), torch.cuda.current_stream(memory.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()  # compiles kernels and builds tables, which cannot be captured
        current.wait_stream(stream)
        self._recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._recorded, pool=memory.pool, capture_error_mode="thread_local"):
            self._output = run()
        self._run = None  # its closure may refer to this graph: the cycle would keep the memory beyond its owner

    def __call__(self) -> T:
        if self._recorded is None:
            assert self._run is not None
            return self._run()
        self._recorded.replay()
        return self._output


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Collect garbage now and disable collection inside the block.

    A graph that is destroyed while another one is being captured invalidates that capture.
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
    """Memory pool shared by the graphs of one engine: only the last replayed graph's results are valid."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._reserved_before = self._reserved()

    @torch.inference_mode()
    def record(self, work: Iterable[Callable[[], object]], name: str) -> int:
        """Run the captures in `work` with a progress bar. Returns GPU bytes taken since construction, or 0."""
        with gc_disabled():
            for record in tqdm(list(work), desc=f"recording graphs of {name}", unit="graph", disable=None, leave=False):
                record()
        return self._reserved() - self._reserved_before

    def _reserved(self) -> int:
        if self.pool is None:
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # as capture does too: cached free memory is not counted
        return torch.cuda.memory_reserved(self.device)
