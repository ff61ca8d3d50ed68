"""The pool of a hybrid target: pages as of any target, and its recurrent layers' states (infer/kvcache/states.py).

A state is of one position. So a cached prefix ends where a *snapshot*, a copy of the state, was taken: at the end of a
page, under the page's key. Snapshots have a budget of their own, and the one that was used least recently is evicted
first. They stay valid without their page, since the key covers the text; without it they are of no use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from infer.kvcache.pool import KVPool
from infer.kvcache.states import HybridLayers
from infer.kvcache.tensors import KVLayers
from infer.request import Phase, Request
from kernels.rows import AttentionRows
from kernels.verify import Accepted

EVERY = 1024  # tokens of a prompt from snapshot to snapshot


class Snapshots:
    """Which slots hold copies of states, and under which keys; uses no tensors."""

    def __init__(self, slots: Sequence[int]) -> None:
        self._free = list(slots)
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    def take(self) -> int | None:
        """Return a slot for a new copy; None if all are of copies that are not published yet."""
        if not self._free and self._slot_of:
            self._free.append(self._slot_of.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def give_back(self, slots: Sequence[int]) -> None:
        self._free += slots

    def publish(self, key: bytes, slot: int) -> None:
        if key in self._slot_of:
            self._free.append(slot)
        else:
            self._slot_of[key] = slot

    def forget(self, key: bytes | None) -> None:
        if key in self._slot_of:
            self._free.append(self._slot_of.pop(key))

    def find(self, key: bytes) -> int:
        """Return the slot of a copy, which is then the most recently used one."""
        self._slot_of.move_to_end(key)
        return self._slot_of[key]

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of


class HybridPool(KVPool):
    """States have a slot for each row of the block table, the null row's included, and then for snapshots."""

    layers: HybridLayers

    def __init__(self, layers: KVLayers, *, max_requests: int, max_positions: int) -> None:
        assert isinstance(layers, HybridLayers)
        super().__init__(layers, max_requests=max_requests, max_positions=max_positions)
        self.snapshots = Snapshots(range(max_requests + 1, layers.windows.shape[1]))

    def cached_prefix(self, request: Request) -> list[int]:
        """Return cached pages up to the last one within the prefix that has a snapshot."""
        pages = super().cached_prefix(request)
        request.matched = len(pages) * self.page_size
        while pages and self._key(request, len(pages)) not in self.snapshots:
            pages.pop()
        return pages

    def adopt(self, request: Request, pages: Sequence[int]) -> None:
        super().adopt(request, pages)
        if pages:
            self.layers.copy_state(self.snapshots.find(self._key(request, len(pages))), request.table_row)
        else:
            self.layers.clear_state(request.table_row)

    def fork(self, parent: Request, child: Request) -> None:
        """Start the child with what the prefix cache holds of the prompt: the parent's state is past its end."""
        self.adopt(child, self.cached_prefix(child))

    def release(self, request: Request) -> None:
        super().release(request)
        self.snapshots.give_back([*request.snapshots.values()])
        request.snapshots.clear()

    def chunk(self, request: Request, rows: int) -> int:
        """End a chunk where a snapshot is due."""
        start, chunk = request.computed, super().chunk(request, rows)
        if request.publish_keys is None:
            return chunk
        last = (len(request.tokens) - 1) // self.page_size * self.page_size
        stops = (stop - start for stop in (request.matched, last, (start // EVERY + 1) * EVERY) if stop > start)
        return min(chunk, *stops, chunk)

    def rows(
        self, requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int], *masks: Any, **layers: Any
    ) -> AttentionRows:
        """Rows of a prompt and a root without drafts are certain: their forward advances the request's state."""
        rows = super().rows(requests, starts, counts, *masks, **layers)
        pairs = zip(requests, counts, strict=True)
        rows.states = tuple((r.table_row, int(count == 1 or r.phase is Phase.PREFILL)) for r, count in pairs if count)
        return rows

    def settle(self, requests: Sequence[Request], accepted: Accepted, *, chains: bool) -> tuple[Tensor, Tensor] | None:
        """Advance the states along the accepted paths too, with a stop at the end of a page for a snapshot."""
        moves, states = super().settle(requests, accepted, chains=chains), self.layers.last_states
        if all(certain for _, certain in states):
            return moves
        before, after = list[list[int]](), list[list[int]]()
        paths = zip(requests, states, accepted.path.tolist(), accepted.depth.tolist(), strict=True)
        for request, (_, certain), path, depth in paths:
            path = [] if certain else path[: depth + 1]
            end = (request.computed + len(path)) // self.page_size * self.page_size - request.computed
            cut = end if request.publish_keys is not None and 0 < end < len(path) else 0
            before.append(path[:cut])
            after.append(path[cut:])
        self.layers.replay(before)
        for request, path in zip(requests, before, strict=True):
            if path:
                self._copy(request, request.computed + len(path))
        self.layers.replay(after)
        return moves

    def keep_features(self, request: Request, features: Tensor) -> None:
        """Keep the state too, where a page ends."""
        super().keep_features(request, features)
        if request.computed % self.page_size == 0 and request.publish_keys is not None:
            self._copy(request, request.computed)

    def publish(self, request: Request, positions: int) -> None:
        super().publish(request, positions)
        for position in [position for position in request.snapshots if position <= request.published]:
            key = self._key(request, position // self.page_size)
            self.snapshots.publish(key, request.snapshots.pop(position))
            if position > len(request.prompt_ids):  # of an answer the last one is enough
                self.snapshots.forget(request.last_snapshot)
                request.last_snapshot = key

    @staticmethod
    def _key(request: Request, pages: int) -> bytes:
        """Return the key of the state after so many pages, whichever other layers are filled there."""
        assert request.plain_keys is not None
        return request.plain_keys.upto(request.tokens, pages)[-1]

    def _copy(self, request: Request, position: int) -> None:
        """Copy the request's state, which is of `position`, for the page that ends there."""
        slot = request.snapshots.get(position)
        slot = self.snapshots.take() if slot is None else slot
        if slot is not None:
            self.layers.copy_state(request.table_row, slot)
            request.snapshots[position] = slot
