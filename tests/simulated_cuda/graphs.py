"""CUDA graphs of the simulated machine: a capture records what would be launched, a replay computes it.

As on a GPU a capture computes nothing: results are memory that the first replay fills, of sizes that torch's meta
device knows. A replay computes on the recorded tensors, whatever the program has done since, so that a value which
Python took at capture stays as it was. Graphs of one pool share memory: what a graph computed in memory of its own is
overwritten with nonsense when another graph of the pool is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from tests.simulated_cuda.machine import CaptureError, machine


class Recording:
    """What a capture has recorded: calls in order, and the memory that they allocated, which the pool owns."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.own: list[Tensor] = []

    def add(self, func: Callable[..., Any], args: Any, kwargs: Any, *, computes: bool = True) -> Any:
        """Record an operation on host memory that returns new tensors; return them, not computed."""
        made = pytree.tree_map_only(Tensor, like_meta, func(*on_meta(args), **on_meta(kwargs)))
        results = tensors_in(made)
        self.own += results

        def call() -> None:
            for result, value in zip(results, tensors_in(func(*args, **kwargs)), strict=True):
                result.copy_(value)

        if computes:
            self.calls.append(call)
        return made


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def on_meta(tree: Any) -> Any:
    def meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        if isinstance(leaf, Tensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return leaf

    return pytree.tree_map(meta, tree)


def like_meta(meta: Tensor) -> Tensor:
    return spoil(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype))


def spoil(memory: Tensor) -> Tensor:
    """Overwrite memory with what no computation expects: NaN, and 1, with which no kernel reads beyond its tensors.

    Where kernels are not computed, what they would write is zero, so that the program goes on as if they were.
    """
    if not machine().computes_all:
        return memory.zero_()
    return memory.fill_(float("nan") if memory.is_floating_point() else 1)


class SimulatedGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._recording = Recording()
        self._others: list[SimulatedGraph] = []

    def replay(self) -> None:
        """Compute everything that was recorded."""
        with torch._C.DisableTorchFunction():
            for other in self._others:
                if other is not self:
                    for memory in other._recording.own:
                        spoil(memory)
            for call in self._recording.calls:
                call()

    @contextmanager
    def captured(self, pool: Any) -> Iterator[None]:
        """Capture what is launched inside the block, in the memory of `pool`."""
        if machine().capture is not None:
            raise CaptureError("a graph is being captured already")
        machine().capture = self._recording
        try:
            yield
        finally:
            machine().capture = None
        self._others = machine().pools.setdefault(pool, [])
        self._others.append(self)
