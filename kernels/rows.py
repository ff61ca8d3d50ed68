"""The rows of a step for paged attention: their requests, their addresses in the KV cache, and the keys they see.

On a GPU one kernel (kernels/triton/rows.py) computes in a launch what takes torch about twenty.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.copies import upload, upload_lists
from kernels.dispatch import uses_triton

WORD_BITS = 64  # of a tree mask


class Addresses(NamedTuple):
    """Where R rows lie and which keys they see."""

    places: Tensor  # [R] int64
    slots: Tensor  # [R] int64 of each row's key and value: page * page_size + offset in the page
    committed: Tensor  # [R] int32
    ends: Tensor  # [R] int32: `committed` and the number of the step's rows that the row sees


@dataclass
class AttentionRows:
    """R rows, grouped by request. A place is an index into the slots of a request's pages.

    A row lies at place `committed + offset` of its request and sees the `committed` places before the step's rows. With
    `tree_mask` it also sees the places `committed + j` for every set bit j (its ancestors and itself), without it those
    of the request's earlier rows and its own; offsets must then be 0, 1, 2, ... No row sees the places before `first`.
    """

    table: Tensor  # [S, P] page ids; rows may overlap
    request: Tensor  # [R] row of `table`
    committed: Tensor  # [R]
    offset: Tensor  # [R]
    tree_mask: Tensor | None  # [R] int64
    page_size: int
    longest: int  # upper bound on the number of keys that a row sees
    counts: tuple[int, ...]  # number of rows of each request with rows, in order; on the host, for launch grids
    first: int = 0
    computed: Addresses | None = None  # if they are already known
    # Of each request with rows, in order, if there are recurrent layers: the slot of its state, and 1 if its rows are
    # certain, so that the state advances with them
    states: tuple[tuple[int, int], ...] = ()

    @classmethod
    def blocks(
        cls,
        table: Tensor,
        committed: list[int],
        counts: list[int],
        *,
        page_size: int,
        requests: list[int] | None = None,
        tree_mask: Tensor | None = None,
        first: int = 0,
    ) -> AttentionRows:
        """Make `counts[b]` rows of request b at offsets 0, 1, ...; `tree_mask` `[R]`, None for causal rows.

        `requests`: the requests' rows of `table`, by default 0, 1, ...
        """
        blocks = list(zip(range(len(counts)) if requests is None else requests, committed, counts, strict=True))
        fields = (
            [row for row, _, count in blocks for _ in range(count)],
            [start for _, start, count in blocks for _ in range(count)],
            [j for count in counts for j in range(count)],
        )
        request, start, offset = upload_lists(fields, table.device)
        longest = max(start + count for _, start, count in blocks)
        rows = tuple(count for count in counts if count)
        return cls(table, request, start, offset, tree_mask, page_size, longest, rows, first)

    @classmethod
    def grid(
        cls,
        table: Tensor,
        requests: Tensor,
        start: Tensor,
        width: int,
        *,
        page_size: int,
        longest: int,
        shift: int = 0,
        offset: int = 0,
        tree_mask: Tensor | None = None,
        first: int = 0,
    ) -> AttentionRows:
        """Make N rows of each of B requests, at offsets `offset`, `offset` + 1, ... from places `start[b] + shift`.

        requests `[B]`: rows of `table`; start `[B]`, tree_mask `[B, N]`, whose bit j stands for place `start[b] +
        shift + j`; without it `offset` must be 0. The host does not wait for the device.
        """
        words = None if tree_mask is None else tree_mask.flatten()
        fixed = words, page_size, longest, (width,) * len(start), first
        if uses_triton(table.device):
            from kernels.triton import rows as gpu

            request, committed, offsets, computed = gpu.grid(
                table, requests, start, width, shift, offset, words, page_size
            )
            return cls(table, request, committed, offsets, *fixed, Addresses(*computed))
        index = torch.arange(len(start) * width, device=start.device)
        owner = index // width
        return cls(table, requests[owner], start[owner] + shift, index % width + offset, *fixed)

    @cached_property
    def addresses(self) -> Addresses:
        if self.computed is not None:
            return self.computed
        if uses_triton(self.table.device):
            from kernels.triton import rows as gpu

            where = self.request, self.committed, self.offset, self.tree_mask
            return Addresses(*gpu.addresses(self.table, *where, self.page_size))
        places = self.committed + self.offset
        page = self.table[self.request, places // self.page_size]
        slots = page * self.page_size + places % self.page_size
        seen = places + 1 if self.tree_mask is None else self.committed + set_bit_positions(self.tree_mask)[1]
        return Addresses(places, slots, self.committed.int(), seen.int())

    @property
    def places(self) -> Tensor:
        return self.addresses.places if uses_triton(self.table.device) else self.committed + self.offset

    @property
    def slots(self) -> Tensor:
        return self.addresses.slots

    def tails(self, tile: int) -> Tensor:
        """For rows of trees, return the slots of the keys after a row's last full tile of committed keys.

        `[R, tile + 64]`, in order of position: committed keys, then the row's ancestors.
        """
        assert self.tree_mask is not None
        if uses_triton(self.table.device):
            from kernels.triton import rows as gpu

            return gpu.tails(self.table, self.request, self.committed, self.tree_mask, self.page_size, tile)
        nth, _ = set_bit_positions(self.tree_mask)
        begin = self.committed // tile * tile
        position = begin[:, None] + torch.arange(tile + WORD_BITS, device=begin.device)
        past_committed = position - self.committed[:, None]
        place = self.committed[:, None] + nth.gather(1, past_committed.clamp(0, WORD_BITS - 1))
        place = torch.where(past_committed < 0, position, place)
        page = (place // self.page_size).clamp(max=self.table.shape[1] - 1)
        return self.table[self.request].gather(1, page) * self.page_size + place % self.page_size


def repeated(values: Tensor, counts: tuple[int, ...]) -> Tensor:
    """values `[B]` -> `[R]`, each `counts[b]` times; if the counts are equal, nothing is copied to the device."""
    if len(set(counts)) == 1:
        return values.repeat_interleave(counts[0])
    return values.repeat_interleave(upload(counts, values.device), output_size=sum(counts))


def set_bit_positions(words: Tensor) -> tuple[Tensor, Tensor]:
    """words `[R]` -> index of the n-th set bit `[R, 64]` (0 past the last), and number of set bits `[R]`."""
    index = torch.arange(WORD_BITS, device=words.device)
    bits = (words[:, None] >> index) & 1
    rank = bits.cumsum(1) - 1
    nth = torch.zeros_like(bits).scatter_add_(1, rank.clamp(min=0), index * bits)
    return nth, bits.sum(1)
