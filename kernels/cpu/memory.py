"""Allocation in huge pages (Linux): every step reads all weights and keys, and each page costs an address translation.

A target's matrices are small compared with a huge page, so they are allocated one after another. What has few bytes in
each huge page that it touches is allocated in small ones.
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

PAGE = 2**21  # bytes of a huge page on x86 and usually on ARM
CHUNK = 2**26  # bytes mapped at a time; parts that are never written take no memory
ALIGNED = 64  # bytes of a cache line


class Memory:
    """Allocates tensors one after another in chunks. A chunk is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._lock = threading.Lock()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        aligned_size = size + -size % ALIGNED
        if aligned_size > CHUNK // 2:
            return chunk(size)[:size].view(dtype).view(*shape)
        with self._lock:
            if self._used + aligned_size > len(self._chunk):
                self._chunk, self._used = chunk(CHUNK), 0
            block = self._chunk[self._used : self._used + size]
            self._used += aligned_size
        return block.view(dtype).view(*shape)


def chunk(size: int, *, huge: bool = True) -> Tensor:
    """Allocate `[size]` zero bytes, aligned to a huge page. They take memory where they are written."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    mapping = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # raised by a system without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    return buffer[-buffer.data_ptr() % PAGE :][:size]


@cache
def _memory() -> Memory:
    return Memory()


def zeros(shape: Sequence[int], dtype: torch.dtype, *, huge: bool = True) -> Tensor:
    """Allocate zeros for long-lived tensors that are read repeatedly."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    if huge:
        return _memory().zeros(shape, dtype)
    return chunk(math.prod(shape) * dtype.itemsize, huge=False).view(dtype).view(*shape)
