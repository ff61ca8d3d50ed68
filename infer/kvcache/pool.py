"""The paged KV pool: one set of page ids for every layer, the head's layers included; who owns which page.

Slot = page * page_size + offset. Page 0 belongs to nobody: what is read there is masked away. The tensors themselves
(infer/kvcache/tensors.py) are told slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kvcache.blocks import Pages
from infer.kvcache.tensors import KVLayers
from infer.request import Request, Upkeep
from infer.speculation.tree import MAX_NODES
from kernels.rows import AttentionRows

FEW = 4  # pages that are written to a block table one by one


class KVPool:
    """Pages and block tables. A request holds pages for a prefix of its positions, in order.

    The target's layers hold a draft tree node by node until its accepted path is moved to the front. A proposer's
    layers, after them, are its own to keep in order.
    """

    def __init__(self, layers: KVLayers, *, max_requests: int, max_positions: int) -> None:
        self.page_size, self.num_pages, self.device = layers.page_size, layers.num_pages, layers.device
        self.layers = layers
        self.pages = Pages(self.num_pages)
        width = -(-(max_positions + MAX_NODES) // self.page_size)  # a tree has more places than positions
        # One row more than requests, of the page that belongs to nobody.
        self.table = torch.zeros(max_requests + 1, width, dtype=torch.int64, device=self.device)
        self.nobody = max_requests

    @property
    def free_pages(self) -> int:
        return self.pages.free

    def free_without(self, known: Sequence[int]) -> int:
        """Pages left for others if `known` ones are held."""
        return self.pages.free_without(known)

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def reserve(self, request: Request, positions: int) -> bool:
        """Grows the request's pages to cover `positions`; False, with nothing changed, when the pool is short."""
        missing = self.pages_for(positions) - len(request.pages)
        if missing <= 0:
            return True
        if missing > self.pages.free:
            return False
        self._append(request, self.pages.take(missing))
        return True

    def release(self, request: Request) -> None:
        self.pages.drop(request.pages)
        self.table[request.slot, : len(request.pages)] = 0
        request.pages = []

    def known(self, request: Request) -> list[int]:
        """Pages that hold the KV of the request's first tokens, one of which at least is left to compute."""
        chains = [request.keys] if request.upkeep is Upkeep.WHOLE else [request.keys, request.plain_keys]
        blocks = (len(request.tokens) - 1) // self.page_size
        return self.pages.find(*(keys.upto(request.tokens, blocks) for keys in chains if keys is not None))

    def adopt(self, request: Request, pages: Sequence[int]) -> None:
        """Begins the request, which holds nothing yet, with `known` pages."""
        assert not request.pages
        self.pages.hold(pages)
        self._append(request, pages)
        request.computed = request.published = len(pages) * self.page_size
        request.last_features = self.pages.value(pages[-1]) if pages else None

    def keep_features(self, request: Request, count: int, features: Tensor) -> None:
        """`features` `[count, F]` of the last committed positions: those that end a page are kept with it."""
        if request.keys is None or not features.shape[-1]:
            return
        first = request.computed - count
        for position in range(first + (-first - 1) % self.page_size, request.computed, self.page_size):
            request.block_ends[position] = features[position - first].clone()

    def publish(self, request: Request, positions: int) -> None:
        """Makes the request's pages over its first `positions` known: these are verified, and filled in every layer
        that the keys stand for.
        """
        keys = request.keys if request.upkeep is Upkeep.WHOLE else request.plain_keys
        if keys is None:
            return
        while request.published + self.page_size <= positions:
            block = request.published // self.page_size
            key = keys.upto(request.tokens, block + 1)[block]
            request.published += self.page_size
            self.pages.publish(request.pages[block], key, request.block_ends.pop(request.published - 1, None))

    def fork(self, parent: Request, child: Request) -> None:
        """Begins the child with the parent's pages over their common prompt; its last token is left to compute.

        Full pages are shared, the page that both go on writing to is copied: the child has its own before it writes.
        """
        shared, rest = divmod(len(child.prompt_ids) - 1, self.page_size)
        self.pages.hold(parent.pages[:shared])
        (own,) = self.pages.take(1)
        self._append(child, [*parent.pages[:shared], own])
        self.layers.copy(parent.pages[shared] * self.page_size, own * self.page_size, rest + 1)
        child.computed, child.published = len(child.prompt_ids) - 1, shared * self.page_size

    def _append(self, request: Request, pages: Sequence[int]) -> None:
        held = len(request.pages)
        if len(pages) <= FEW:  # as in decoding: numbers go with a launch, and the host does not wait for a copy
            for place, page in enumerate(pages, start=held):
                self.table[request.slot, place] = page
        else:
            self.table[request.slot, held : held + len(pages)] = torch.tensor(list(pages), device=self.device)
        request.pages += pages

    def move(self, requests: Sequence[Request], sources: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """Brings the KV of places `sources[b]` to places `starts[b]`, `starts[b] + 1`, ... in the target's layers.

        An accepted path comes to the front of its tree; sources ascend and none lies before its destination.
        """
        pairs = [
            (self._slot(request, source), self._slot(request, start + index))
            for request, own, start in zip(requests, sources, starts, strict=True)
            for index, source in enumerate(own)
            if source != start + index
        ]
        if pairs:
            source, destination = torch.tensor(pairs, device=self.device).T
            self.layers.move(source, destination)

    def _slot(self, request: Request, place: int) -> int:
        return request.pages[place // self.page_size] * self.page_size + place % self.page_size

    def invariants(self, running: Sequence[Request]) -> None:
        """Every page is free, known or held, and tables say what requests hold. For tests: it looks at everything."""
        self.pages.invariants(page for request in running for page in request.pages)
        for request in running:
            assert self.table[request.slot, : len(request.pages)].tolist() == request.pages

    def rows(
        self,
        requests: Sequence[Request],
        starts: Sequence[int],
        counts: Sequence[int],
        words: Tensor | None = None,
        *,
        first: int = 0,
        bases: Sequence[int] | None = None,
    ) -> AttentionRows:
        """Addresses `counts[b]` new rows of each request from place `starts[b]` on; `words` `[R]` for a tree's rows.

        `bases`: places, a multiple of the page size, that each request's layers begin at; places count from there.
        """
        table, starts = self._tables(requests, starts, bases)
        size = self.page_size
        return AttentionRows.blocks(table, starts, list(counts), page_size=size, words=words, first=first)

    def level(
        self,
        requests: Sequence[Request],
        starts: Sequence[int],
        offsets: Tensor,
        words: Tensor,
        *,
        first: int = 0,
        bases: Sequence[int] | None = None,
    ) -> AttentionRows:
        """Addresses N rows of each request, at places `starts[b] + offsets[n]`; `words` `[B, N]` count from there."""
        table, starts = self._tables(requests, starts, bases)
        count, width = words.shape
        request = torch.arange(count, device=self.device).repeat_interleave(width)
        committed = torch.tensor(starts, device=self.device).repeat_interleave(width)
        longest = max(starts) + MAX_NODES
        return AttentionRows(
            table,
            request,
            committed,
            offsets.repeat(count),
            words.flatten(),
            self.page_size,
            longest,
            (width,) * count,
            first,
        )

    def _tables(
        self, requests: Sequence[Request], starts: Sequence[int], bases: Sequence[int] | None
    ) -> tuple[Tensor, list[int]]:
        """The requests' page ids `[B, P]` and places `starts`, both from `bases` on."""
        slots = torch.tensor([request.slot for request in requests], device=self.device)
        table = self.table.index_select(0, slots)
        if bases is None or not any(bases):
            return table, list(starts)
        skipped = torch.tensor(bases, device=self.device)[:, None] // self.page_size
        columns = (torch.arange(table.shape[1], device=self.device) + skipped).clamp(max=table.shape[1] - 1)
        return table.gather(1, columns), [start - base for start, base in zip(starts, bases, strict=True)]
