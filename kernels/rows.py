"""Which rows a step adds to which requests, and what each of them sees: the address side of paged attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class AttentionRows:
    """R rows, those of one request beside each other. A place is a position's room in the request's pages.

    A row lies at place `committed + offset` of its request and sees the `committed` places before the step's rows;
    besides, with `words`, the places `committed + j` for every set bit j (its ancestors and itself), else the places
    of the rows before it and its own. Without words a request's offsets must be 0, 1, 2, ... Nobody sees the places
    before `first`.
    """

    table: Tensor  # [B, P] page ids
    request: Tensor  # [R] row of `table`
    committed: Tensor  # [R]
    offset: Tensor  # [R]
    words: Tensor | None  # [R] int64
    page_size: int
    longest: int  # at least the number of keys that any row sees
    counts: tuple[int, ...]  # rows of each request that has any, as they lie: what a grid is made from, without a copy
    first: int = 0

    @classmethod
    def blocks(
        cls,
        table: Tensor,
        committed: list[int],
        counts: list[int],
        *,
        page_size: int,
        words: Tensor | None = None,
        first: int = 0,
    ) -> AttentionRows:
        """`counts[b]` rows of request b at offsets 0, 1, ...; `words` `[R]`, None for rows that each see all before."""
        device = table.device
        blocks = list(enumerate(zip(committed, counts, strict=True)))
        total = sum(counts)
        room = [0] * (total % 2)  # so that each begins at a multiple of 16 bytes, as Triton's kernels are compiled for
        fields = [
            [b for b, (_, count) in blocks for _ in range(count)] + room,
            [start for _, (start, count) in blocks for _ in range(count)] + room,
            [j for count in counts for j in range(count)] + room,
        ]
        # one tensor, since each takes its time
        request, start, offset = torch.tensor(fields, device=device)[:, :total]
        longest = max(start + count for _, (start, count) in blocks)
        rows = tuple(count for count in counts if count)
        return cls(table, request, start, offset, words, page_size, longest, rows, first)

    def next(self) -> AttentionRows:
        """Of chains, one row of each request: the row after it, which sees this one too."""
        assert self.words is None
        assert len(self.counts) == len(self.request)
        return replace(self, committed=self.committed + 1, longest=self.longest + 1)

    def kept(self, index: Tensor) -> AttentionRows:
        """Of these, one row of each request, the requests `index` `[K]` alone."""
        assert len(self.counts) == len(self.request)
        left = len(index)
        own = {"request": self.request[:left], "offset": self.offset[:left], "counts": self.counts[:left]}
        return replace(self, table=self.table[index], committed=self.committed[index], **own)

    @cached_property
    def places(self) -> Tensor:
        return self.committed + self.offset

    @cached_property
    def slots(self) -> Tensor:
        """[R] where each row's own key and value go: page * page_size + offset in the page."""
        places = self.places
        page = self.table[self.request, places // self.page_size]
        return page * self.page_size + places % self.page_size
