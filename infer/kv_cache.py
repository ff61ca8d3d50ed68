"""The paged KV pool: one set of page ids for every layer, the head's layers included; who owns which page.

Slot = page * page_size + offset. Page 0 belongs to nobody: what is read there is masked away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.request import Request
from kernels.attention import PagedAttention, plan_attention
from kernels.rows import AttentionRows


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

    def rows(
        self, requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int], words: Tensor | None = None
    ) -> AttentionRows:
        """Addresses `counts[b]` new rows of each request from place `starts[b]` on; `words` `[R]` for a tree's rows."""
        table = self._table[[request.slot for request in requests]]
        return AttentionRows.blocks(table, list(starts), list(counts), page_size=self.page_size, words=words)

    def attention(
        self, rows: AttentionRows, num_heads: int, num_kv_heads: int, head_dim: int, *, first_layer: int = 0
    ) -> PooledAttention:
        """The attention seam over these rows; `first_layer` is where the model's layers begin in the pool."""
        plan = plan_attention(rows, num_heads, num_kv_heads, head_dim, self.caches[first_layer].dtype)
        return PooledAttention(self.caches, first_layer, plan)


class PooledAttention:
    """Implements models.attention.Attention over the pool: writes the rows' KV, then reads their request's."""

    def __init__(self, caches: Sequence[Tensor], first_layer: int, plan: PagedAttention) -> None:
        self._caches, self._first, self._plan = caches, first_layer, plan

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._plan(q, k, v, self._caches[self._first + layer], q.shape[-1] ** -0.5)
