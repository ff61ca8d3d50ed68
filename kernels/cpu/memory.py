"""Memory in large pages (Linux): weights and keys are read from end to end in every step, and the processor looks up
the address of every page. A target's matrices are small beside such a page, so they lie one after another.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

PAGE = 2**21  # bytes; of x86 and, as a rule, of ARM
CHUNK = 2**26  # asked of the system at a time: what of it is never written takes no memory
ALIGNED = 64  # bytes of a line of the caches


class Memory:
    """Tensors one after another. A chunk goes back to the system with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._lock = threading.Lock()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        taken = size + -size % ALIGNED
        if taken > CHUNK // 2:
            return chunk(size)[:size].view(dtype).view(*shape)
        with self._lock:
            if self._used + taken > len(self._chunk):
                self._chunk, self._used = chunk(CHUNK), 0
            own = self._chunk[self._used : self._used + size]
            self._used += taken
        return own.view(dtype).view(*shape)


def chunk(size: int) -> Tensor:
    """`[size]` zeros in bytes, from the beginning of a large page on."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    whole = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a system without them: its pages are small
        whole.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(whole, dtype=torch.uint8)
    return found[-found.data_ptr() % PAGE :][:size]


@cache
def _memory() -> Memory:
    return Memory()


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """For what lasts and is read again and again."""
    return _memory().zeros(shape, dtype) if hasattr(mmap, "MADV_HUGEPAGE") else torch.zeros(*shape, dtype=dtype)
