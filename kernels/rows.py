"""The rows of a step for paged attention: their requests, their addresses in the KV cache, and the keys they see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class AttentionRows:
    """R rows, grouped by request. A place is an index into the slots of a request's pages.

    A row lies at place `committed + offset` of its request and sees the `committed` places before the step's rows. With
    `tree_mask` it also sees the places `committed + j` for every set bit j (its ancestors and itself), without it those
    of the request's earlier rows and its own; offsets must then be 0, 1, 2, ... No row sees the places before `first`.
    """

    table: Tensor  # [B, P] page ids
    request: Tensor  # [R] row of `table`
    committed: Tensor  # [R]
    offset: Tensor  # [R]
    tree_mask: Tensor | None  # [R] int64
    page_size: int
    longest: int  # upper bound on the number of keys that a row sees
    counts: tuple[int, ...]  # number of rows of each request with rows, in order; on the host, for launch grids
    first: int = 0

    @classmethod
    def blocks(
        cls,
        table: Tensor,
        committed: list[int],
        counts: list[int],
        *,
        page_size: int,
        tree_mask: Tensor | None = None,
        first: int = 0,
    ) -> AttentionRows:
        """Make `counts[b]` rows of request b at offsets 0, 1, ...; `tree_mask` `[R]`, None for causal rows."""
        device = table.device
        blocks = list(enumerate(zip(committed, counts, strict=True)))
        total = sum(counts)
        padding = [0] * (total % 2)  # padding: Triton kernels are compiled for addresses that are multiples of 16 bytes
        fields = [
            [b for b, (_, count) in blocks for _ in range(count)] + padding,
            [start for _, (start, count) in blocks for _ in range(count)] + padding,
            [j for count in counts for j in range(count)] + padding,
        ]
        # a single tensor, since creating each one takes time
        request, start, offset = torch.tensor(fields, device=device)[:, :total]
        longest = max(start + count for _, (start, count) in blocks)
        rows = tuple(count for count in counts if count)
        return cls(table, request, start, offset, tree_mask, page_size, longest, rows, first)

    @classmethod
    def grid(
        cls,
        table: Tensor,
        start: Tensor,
        offset: Tensor,
        *,
        page_size: int,
        longest: int,
        tree_mask: Tensor | None = None,
        first: int = 0,
    ) -> AttentionRows:
        """Make N rows of each of B requests, at places `start[b] + offset[n]`; the host does not wait for the device.

        start `[B]`, offset `[N]`, tree_mask `[B, N]`, whose bit j stands for place `start[b] + j`; without it offsets
        must be 0, 1, 2, ...
        """
        batch, width = len(start), len(offset)
        request = torch.arange(batch, device=start.device).repeat_interleave(width)
        words = None if tree_mask is None else tree_mask.flatten()
        counts = (width,) * batch
        return cls(table, request, start[request], offset.repeat(batch), words, page_size, longest, counts, first)

    def next(self) -> AttentionRows:
        """Return the next row of each chain, which also sees this one. Needs one row per request and no tree mask."""
        assert self.tree_mask is None
        assert len(self.counts) == len(self.request)
        return replace(self, committed=self.committed + 1, longest=self.longest + 1)

    @cached_property
    def places(self) -> Tensor:
        return self.committed + self.offset

    @cached_property
    def slots(self) -> Tensor:
        """[R] slot of each row's key and value: page * page_size + offset in the page."""
        places = self.places
        page = self.table[self.request, places // self.page_size]
        return page * self.page_size + places % self.page_size
