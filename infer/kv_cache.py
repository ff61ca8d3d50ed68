"""The paged KV pool: one set of page ids for every layer, the head's layers included; who owns which page.

Slot = page * page_size + offset. Page 0 belongs to nobody: what is read there is masked away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.request import Request
from kernels.attention import AttentionPlan, node_plan, paged_attention, plan_attention, write_cache


class LayerShape(NamedTuple):
    kv_heads: int
    head_dim: int


class KVPool:
    """Pages and block tables. A request holds pages for a prefix of its positions, in order."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_pages: int,
        page_size: int,
        max_requests: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size, self.num_pages, self.device = page_size, num_pages, device
        slots = (num_pages + 1) * page_size
        self.caches = [
            torch.zeros(2, shape.kv_heads, slots, shape.head_dim, dtype=dtype, device=device) for shape in layers
        ]
        self._free = list(range(num_pages, 0, -1))
        width = -(-max_positions // page_size)
        self._table = torch.zeros(max_requests, width, dtype=torch.int64, device=device)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def reserve(self, request: Request, positions: int) -> bool:
        """Grows the request's pages to cover `positions`; False, with nothing changed, when the pool is short."""
        missing = self.pages_for(positions) - len(request.pages)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        new = [self._free.pop() for _ in range(missing)]
        held = len(request.pages)
        self._table[request.slot, held : held + missing] = torch.tensor(new, device=self.device)
        request.pages += new
        return True

    def release(self, request: Request) -> None:
        self._free += reversed(request.pages)
        self._table[request.slot, : len(request.pages)] = 0
        request.pages = []

    def check(self, running: Sequence[Request]) -> None:
        """Invariant: every page is free or belongs to exactly one running request."""
        held = [page for request in running for page in request.pages]
        assert sorted(held + self._free) == list(range(1, self.num_pages + 1)), "pages leaked or shared"
        for request in running:
            assert self._table[request.slot, : len(request.pages)].tolist() == request.pages

    def rows(self, requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int]) -> PagedRows:
        """Addresses `counts[b]` new rows of each request from position `starts[b]` on."""
        table = self._table[[request.slot for request in requests]]
        start, count = torch.tensor(starts, device=self.device), torch.tensor(counts, device=self.device)
        local = torch.arange(max(counts), device=self.device)
        places = start[:, None] + local  # [B, N]
        page = (places // self.page_size).clamp(max=table.shape[1] - 1)
        slots = table.gather(1, page) * self.page_size + places % self.page_size
        inside = local < count[:, None]
        return PagedRows(self, table, start, count, slots[inside], places[inside])


class PagedRows:
    """The rows of one forward: where their KV goes and, per model, what they attend to."""

    def __init__(
        self, pool: KVPool, table: Tensor, starts: Tensor, counts: Tensor, slots: Tensor, places: Tensor
    ) -> None:
        self.slots, self.places = slots, places  # [R] pool slot and place in the request (= position for a chain)
        self._pool, self._table, self._starts, self._counts = pool, table, starts, counts

    def attention(
        self, num_heads: int, kv_heads: int, *, first_layer: int = 0, ancestors: Tensor | None = None
    ) -> PagedAttention:
        """The attention seam over these rows; `first_layer` is where the model's layers begin in the pool."""
        plan = self.plan(num_heads, kv_heads, ancestors)
        return PagedAttention(self._pool.caches, first_layer, self.slots, plan)

    def plan(self, num_heads: int, kv_heads: int, ancestors: Tensor | None = None) -> AttentionPlan:
        return plan_attention(
            self._table,
            self._starts,
            self._counts,
            page_size=self._pool.page_size,
            num_kv_heads=kv_heads,
            group=num_heads // kv_heads,
            ancestors=ancestors,
        )


class PagedChain:
    """The rows of a chain that is drafted one row per request at a time: addressed and planned once for all of them."""

    def __init__(
        self,
        pool: KVPool,
        requests: Sequence[Request],
        starts: Sequence[int],
        length: int,
        *,
        num_heads: int,
        kv_heads: int,
        first_layer: int,
    ) -> None:
        rows = pool.rows(requests, starts, [length] * len(requests))
        self._pool, self._first, self._length = pool, first_layer, length
        self._slots, self._places = rows.slots.view(-1, length), rows.places.view(-1, length)
        self._plan = rows.plan(num_heads, kv_heads)

    def row(self, index: int) -> tuple[Tensor, PagedAttention]:
        """Positions `[B]` of the chain's row `index`, and the attention seam for it."""
        plan = node_plan(self._plan, index, self._length)
        attention = PagedAttention(self._pool.caches, self._first, self._slots[:, index], plan)
        return self._places[:, index], attention


class PagedAttention:
    """Implements models.attention.Attention over the pool: writes the rows' KV, then reads their request's."""

    def __init__(self, caches: Sequence[Tensor], first_layer: int, slots: Tensor, plan: AttentionPlan) -> None:
        self._caches, self._first, self._slots, self._plan = caches, first_layer, slots, plan

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self._caches[self._first + layer]
        write_cache(cache, self._slots, k, v)
        return paged_attention(q, cache, self._plan, q.shape[-1] ** -0.5)
