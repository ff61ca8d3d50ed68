"""Limits of the device that kernels are launched on: tiles, warps and grids follow from them, bits do not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Limits(NamedTuple):
    capability: int  # 80 for an A100, 90 for an H100
    multiprocessors: int
    shared_memory: int  # bytes that one program may use

    @property
    def warpgroups(self) -> bool:
        """Whether four warps share a product of 64 lines: Hopper, and Blackwell in data centres."""
        return self.capability // 10 in (9, 10)

    @property
    def half_shared_memory(self) -> int:
        """Bytes for each of two programs on a multiprocessor, which reserves 1 KB for each."""
        return (self.shared_memory + 1024) // 2 - 1024


HOPPER = Limits(capability=90, multiprocessors=132, shared_memory=227 * 1024)  # H100 and H200
without_gpu = HOPPER  # for the interpreter, and for compilation, which sets others


def limits(device: torch.device) -> Limits:
    return _limits_of_gpu(device) if device.type == "cuda" else without_gpu


def empties(number: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return `number` tensors. Each begins where an allocation does: kernels are compiled for such addresses."""
    return [torch.empty(*shape, dtype=dtype, device=device) for _ in range(number)]


@functools.cache
def _limits_of_gpu(device: torch.device) -> Limits:
    from triton.compiler.compiler import max_shared_mem

    properties = torch.cuda.get_device_properties(device)
    shared_memory = int(max_shared_mem(device.index or 0))
    return Limits(10 * properties.major + properties.minor, properties.multi_processor_count, shared_memory)
