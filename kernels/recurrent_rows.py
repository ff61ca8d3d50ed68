"""Rows of a recurrent layer (kernels/recurrence.py): which row or state each of them follows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels.copies import upload, upload_lists
from kernels.cpu.library import library
from kernels.dispatch import address

L2_EPS = 1e-6  # of queries and keys of a gated delta net


@dataclass
class RecurrentRows:
    """R rows of B requests, request by request; a row's parent precedes it."""

    counts: tuple[int, ...]  # rows of each request, on the host
    slots: Tensor | None  # [B] int64, of the requests' states; None: they begin with zeros, and none is kept
    advance: Tensor  # [B] bool: the state of the request's last row replaces the one in its slot; a chain then
    parents: Tensor | None = None  # [R] int32: the parent among its request's rows, -1: the state. None: chains.
    # Where there are parents, a request that does not advance has at most 64 rows on a GPU, or 65 below the first.

    @classmethod
    def chains(cls, counts: Sequence[int], slots: Sequence[int] | None, device: torch.device) -> RecurrentRows:
        """Make chains that are all certain: prompts, single tokens, accepted paths."""
        at = None if slots is None else upload(list(slots), device)
        return cls(tuple(counts), at, torch.full((len(counts),), slots is not None, device=device))

    @cached_property
    def owner(self) -> Tensor:
        """int64 `[R]`: which request each row belongs to."""
        device = self.advance.device
        if len(set(self.counts)) == 1:  # captured in a CUDA graph, where nothing can be uploaded
            return torch.arange(len(self.counts), device=device).repeat_interleave(self.counts[0])
        return upload([b for b, count in enumerate(self.counts) for _ in range(count)], device)

    @cached_property
    def first(self) -> Tensor:
        """int64 `[B + 1]`: where each request's rows begin."""
        device = self.advance.device
        if len(set(self.counts)) == 1:
            return self.counts[0] * torch.arange(len(self.counts) + 1, device=device)
        return upload([0, *itertools.accumulate(self.counts)], device)

    @cached_property
    def above(self) -> Tensor:
        """int64 `[R]`: the parent's row in the call, or -1 for the newest column of the request's state."""
        first = self.first[self.owner]
        row = torch.arange(len(first), device=first.device)
        parents = row - first - 1 if self.parents is None else self.parents.long()
        return torch.where(parents >= 0, first + parents, -1)

    def ancestors(self, count: int) -> Tensor:
        """Return the `count` ancestors of each row, oldest first: `[R, count]` int64.

        A row of the call, or below 0 a column of the state counted from its end.
        """
        nodes, newest_first = self.above, list[Tensor]()
        for _ in range(count):
            newest_first.append(nodes)
            nodes = torch.where(nodes >= 0, self.above[nodes.clamp(min=0)], nodes - 1)
        return torch.stack(newest_first[::-1], dim=1)

    @cached_property
    def fields(self) -> dict[str, int | None]:
        """What both functions of C are told of the rows."""
        for tensor, dtype in ((self.slots, torch.int64), (self.advance, torch.bool), (self.parents, torch.int32)):
            assert tensor is None or (tensor.is_contiguous() and tensor.dtype is dtype)
        pointers = {name: address(getattr(self, name)) for name in ("first", "slots", "advance")}
        return {**pointers, "requests": len(self.counts)}

    @cached_property
    def visits(self) -> tuple[Tensor | None, int]:
        """In which order C visits rows of trees, and how many states it keeps at a time: see recurrence.c."""
        native = library()
        if self.parents is None or native is None:
            return None, 1
        rows = self.parents.shape[0]
        work, visits = torch.empty(4, rows, dtype=torch.int32), torch.empty(3, rows, dtype=torch.int32)
        pointers = self.first.data_ptr(), self.parents.data_ptr()
        return visits, native.order_trees(*pointers, len(self.counts), rows, work.data_ptr(), visits.data_ptr())

    def along(self, paths: Sequence[Sequence[int]]) -> tuple[Tensor, RecurrentRows]:
        """Return the rows `paths[b]`, node by node from the root, of each request, and how they advance its state.

        Requests of an empty path are left out.
        """
        assert self.slots is not None
        firsts = [0, *itertools.accumulate(self.counts)]
        taken = [(b, path) for b, path in enumerate(paths) if len(path)]
        rows = [firsts[b] + node for b, path in taken for node in path]
        index, requests = upload_lists((rows, [b for b, _ in taken]), self.advance.device)
        counts = tuple(len(path) for _, path in taken)
        return index, RecurrentRows(counts, self.slots[requests], torch.ones_like(requests, dtype=torch.bool))
