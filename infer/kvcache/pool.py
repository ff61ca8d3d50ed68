"""The paged KV pool: block tables with one set of page ids for all layers, the head's included.

A place is an index into a request's pages; its slot is page * page_size + offset. Page 0 is the null block: what is
read there is masked. The tensors (infer/kvcache/tensors.py) are addressed by slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.batch.tree import MAX_NODES
from infer.kvcache.pages import PageKeys, Pages
from infer.kvcache.tensors import KVLayers
from infer.request import Request
from kernels.copies import upload
from kernels.rows import AttentionRows
from kernels.verify import Accepted

INLINE_WRITES = 4  # up to so many pages are written to a block table one by one


class KVPool:
    """Pages and block tables. A request holds pages for a prefix of its positions, in order.

    The target's layers hold a draft tree node by node until its accepted path is moved to the front. A proposer's
    layers follow them, and the proposer itself manages their contents.
    """

    def __init__(self, layers: KVLayers, *, max_requests: int, max_positions: int) -> None:
        self.page_size, self.num_pages, self.device = layers.page_size, layers.num_pages, layers.device
        self.layers = layers
        self.pages = Pages(layers.page_ids)
        width = -(-(max_positions + MAX_NODES) // self.page_size)  # a tree has more places than positions
        # One more row than requests: a dummy request, all of whose pages are the null block.
        self.table = torch.zeros(max_requests + 1, width, dtype=torch.int64, device=self.device)
        self.null_row = max_requests

    @property
    def free_pages(self) -> int:
        return self.pages.free

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def reserve(self, request: Request, positions: int) -> bool:
        """Extend the request's pages to cover `positions`. Returns False, changing nothing, if the pool is short."""
        missing = self.pages_for(positions) - len(request.pages)
        if missing <= 0:
            return True
        if missing > self.pages.free:
            return False
        self._append(request, self.pages.take(missing))
        return True

    def release(self, request: Request) -> None:
        self.pages.drop(request.pages)
        self.table[request.table_row, : len(request.pages)] = 0
        request.pages = []

    def keys(self, salt: str, filled_by: str) -> PageKeys:
        """Return the keys of a new request's pages. `filled_by`: a name for the layers that it fills besides the
        target's.
        """
        return PageKeys(self.pages.secret, salt, filled_by, self.page_size)

    def cached_prefix(self, request: Request) -> list[int]:
        """Return cached pages that hold a prefix of the request. At least its last token is left to compute."""
        blocks = (len(request.tokens) - 1) // self.page_size
        return self.pages.find(*(keys.upto(request.tokens, blocks) for keys in request.lookup_keys))

    def adopt(self, request: Request, pages: Sequence[int]) -> None:
        """Start the request, which holds no pages yet, with cached `pages`."""
        assert not request.pages
        self.pages.hold(pages)
        self._append(request, pages)
        request.computed = request.published = len(pages) * self.page_size
        request.last_features = self.pages.value(pages[-1]) if pages else None

    def keep_features(self, request: Request, features: Tensor) -> None:
        """Keep those of the `features` `[n, F]` of the last n positions that end a page, to be published with it."""
        if request.keys is None or not request.drafter.aux_layers:
            return
        first = request.computed - len(features)
        for position in range(first + (-first - 1) % self.page_size, request.computed, self.page_size):
            request.page_ends[position] = features[position - first].clone()

    def publish(self, request: Request, positions: int) -> None:
        """Add the request's full pages within its first `positions` to the prefix cache.

        These positions must be verified, and filled in every layer that the keys cover.
        """
        keys = request.publish_keys
        while keys is not None and request.published + self.page_size <= positions:
            block = request.published // self.page_size
            key = keys.upto(request.tokens, block + 1)[block]
            request.published += self.page_size
            self.pages.publish(request.pages[block], key, request.page_ends.pop(request.published - 1, None))

    def fork(self, parent: Request, child: Request) -> None:
        """Start the child with the parent's pages of their common prompt, whose last token is left to compute.

        Full pages are shared. The page that both will write to is copied, before the child writes.
        """
        shared, rest = divmod(len(child.prompt_ids) - 1, self.page_size)
        self.pages.hold(parent.pages[:shared])
        (copied_page,) = self.pages.take(1)
        self._append(child, [*parent.pages[:shared], copied_page])
        self.layers.copy(parent.pages[shared] * self.page_size, copied_page * self.page_size, rest + 1)
        child.computed, child.published = len(child.prompt_ids) - 1, shared * self.page_size

    def _append(self, request: Request, pages: Sequence[int]) -> None:
        held = len(request.pages)
        if len(pages) <= INLINE_WRITES:  # a slice is filled with a launch argument; the host would wait for one element
            for place, page in enumerate(pages, start=held):
                self.table[request.table_row, place : place + 1] = page
        else:
            self.table[request.table_row, held : held + len(pages)] = upload(list(pages), self.device)
        request.pages += pages

    def chunk(self, request: Request, rows: int) -> int:
        """Return how many of its next positions the request should compute, given that many rows."""
        return min(rows, len(request.tokens) - request.computed)

    def settle(self, requests: Sequence[Request], accepted: Accepted, *, chains: bool) -> tuple[Tensor, Tensor] | None:
        """Take what was accepted of the requests' drafts; return the `moves` that follow, in a chain none."""
        return None if chains else self.moves(requests, accepted)

    def moves(self, requests: Sequence[Request], accepted: Accepted) -> tuple[Tensor, Tensor] | None:
        """Return the slots from and to which the KV of accepted paths moves; None if all nodes lie where they should.

        A path's nodes move to the first places of their tree, whose root lies at the place `request.computed`.
        """
        size, slots = self.page_size, ([], [])
        for request, path, depth in zip(requests, accepted.path.tolist(), accepted.depth.tolist(), strict=True):
            for index in range(1, depth + 1):
                if path[index] != index:
                    for moved, node in zip(slots, (path[index], index), strict=True):
                        page, offset = divmod(request.computed + node, size)
                        moved.append(request.pages[page] * size + offset)
        if not slots[0]:
            return None
        source, destination = upload(slots, self.device)
        return source, destination

    def rows(
        self,
        requests: Sequence[Request],
        starts: Sequence[int],
        counts: Sequence[int],
        tree_mask: Tensor | None = None,
        *,
        first: int = 0,
        bases: Sequence[int] | None = None,
    ) -> AttentionRows:
        """Address `counts[b]` new rows of each request from place `starts[b]` on; `tree_mask` `[R]`: tree mask, if any.

        `bases`: the place at which each request's layers begin, a multiple of the page size. Places in the result
        count from there.
        """
        size, table, rows = self.page_size, self.table, [request.table_row for request in requests]
        if bases is not None and any(bases):
            table, width = self.page_lists, table.shape[1]
            rows = [row * width + base // size for row, base in zip(rows, bases, strict=True)]
            starts = [start - base for start, base in zip(starts, bases, strict=True)]
        return AttentionRows.blocks(
            table, list(starts), list(counts), requests=rows, page_size=size, tree_mask=tree_mask, first=first
        )

    @property
    def page_lists(self) -> Tensor:
        """The block tables from every page on: row `r * width + k` begins with page k of row r of the table."""
        return self.table.flatten().unfold(0, self.table.shape[1], 1)
