"""Schedules the requests of a step: admission, chunked prefill, page reservation, pre-emption. Uses no tensors."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from infer.kvcache.pool import KVPool
from infer.request import Phase, Request
from infer.speculation.budget import NOTHING, Budget


def order(request: Request) -> tuple[int, int]:
    """Return the sort key of service: higher priority, then earlier arrival. A pre-empted request keeps its arrival."""
    return -request.params.priority, request.arrival


def prompt_is_ready(parent: Request) -> bool:
    """Return whether the prompt's other completions can start: it is computed and, for a first draft, was read too."""
    return parent.phase is Phase.FINISHED or (parent.phase is Phase.DECODE and parent.computed > len(parent.prompt_ids))


@dataclass
class Step:
    decodes: list[Request] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)  # per decode
    prefills: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)  # positions per prefill


class Scheduler:
    """Serves higher priority first, then first come, first served.

    When pages run out, the last running request in this order is pre-empted: its pages are freed, and later it is
    recomputed from its tokens by the same kernels, so with the same bits.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        max_batch: int,
        max_rows: int,
        prefill_chunk: int,
        draft_budget: Callable[[Request], Budget],
        draft_places: Callable[[Request, Budget], int],
        on_preempt: Callable[[Request], None],
        on_meet: Callable[[Request], None],
        on_resume: Callable[[Request], None],
    ) -> None:
        self._pool, self._max_rows, self._chunk = pool, max_rows, prefill_chunk
        self._draft_budget, self._draft_places = draft_budget, draft_places
        self._on_preempt, self._on_meet, self._on_resume = on_preempt, on_meet, on_resume
        self._free_slots = list(range(max_batch - 1, -1, -1))
        self.waiting: list[Request] = []  # both sorted by `order`
        self.running: list[Request] = []
        self.preemptions = 0
        self._short = False  # too few pages for the first waiting request; reset when a request is added or removed

    def add(self, request: Request) -> None:
        self._short = False
        bisect.insort(self.waiting, request, key=order)

    def remove(self, request: Request) -> None:
        """Remove a finished or aborted request, whether running or waiting."""
        self._short = False
        if request in self.running:
            self._free(request)
        else:
            self.waiting.remove(request)
        request.phase = Phase.FINISHED

    @property
    def may_admit(self) -> bool:
        """Return whether a waiting request could start: a slot is free, and pages for the next one may be."""
        return bool(self.waiting and self._free_slots and not self._short)

    def schedule(self) -> Step:
        """Choose the work of the next step and reserve its pages.

        Decodes come first: they hold memory, and users are waiting for their tokens. Each is guaranteed its root's row;
        rows that are not set aside for prompts are shared among their drafts.
        """
        step = Step()
        rows = self._max_rows
        decodes = [request for request in self.running if request.phase is Phase.DECODE]
        prompts = self.waiting or len(decodes) < len(self.running)
        spare = rows - len(decodes) - (min(self._chunk, (rows - len(decodes)) // 2) if prompts else 0)
        for index, request in enumerate(decodes):
            if request.phase is not Phase.DECODE:
                continue  # pre-empted in this loop for an earlier request
            budget = self._draft_budget(request).within(spare // (len(decodes) - index))
            if not self._pool.reserve(request, len(request.tokens) + self._draft_places(request, budget)):
                budget = NOTHING
                if not self._reserve_or_preempt(request, len(request.tokens)):
                    continue
            step.decodes.append(request)
            step.budgets.append(budget)
            rows -= 1 + budget.nodes
            spare -= budget.nodes
        step.decodes, step.budgets = self._still_running(step.decodes, step.budgets)
        for request in [r for r in self.running if r.phase is Phase.PREFILL]:
            chunk = min(self._chunk, rows, len(request.tokens) - request.computed)
            if chunk > 0 and self._pool.reserve(request, request.computed + chunk):
                step.prefills.append(request)
                step.chunks.append(chunk)
                rows -= chunk
        for request in list(self.waiting):
            if not self._free_slots or rows < 1:
                break
            if request.parent is not None and not prompt_is_ready(request.parent):
                continue
            self._on_meet(request)
            known = self._pool.known(request)
            # The whole prompt must fit beside the running requests, or it would soon be pre-empted again.
            if self._pool.pages_for(len(request.tokens) + 1) - len(known) > self._pool.free_without(known):
                self._short = True
                break
            self._admit(request, known)
            reserved = self._pool.reserve(request, len(request.tokens))
            assert reserved
            chunk = min(self._chunk, rows, len(request.tokens) - request.computed)
            step.prefills.append(request)
            step.chunks.append(chunk)
            rows -= chunk
        return step

    def _admit(self, request: Request, known: list[int]) -> None:
        self.waiting.remove(request)
        request.slot, request.phase, request.computed = self._free_slots.pop(), Phase.PREFILL, 0
        request.published = 0
        bisect.insort(self.running, request, key=order)
        request.last_features = None
        request.block_ends.clear()
        parent, request.parent = request.parent, None
        if parent is not None and parent.phase is Phase.DECODE:
            self._pool.fork(parent, request)
        else:
            self._pool.adopt(request, known)
        if not request.output_length:  # after a pre-emption the cached pages may be its own
            request.cached = request.computed
        if request.computed:
            self._on_resume(request)

    def _still_running(self, requests: list[Request], budgets: list[Budget]) -> tuple[list[Request], list[Budget]]:
        pairs = [(r, b) for r, b in zip(requests, budgets, strict=True) if r.phase is Phase.DECODE]
        return [r for r, _ in pairs], [b for _, b in pairs]

    def _reserve_or_preempt(self, request: Request, positions: int) -> bool:
        """Pre-empt the last in order until the pages are free; False if the request itself was pre-empted."""
        while not self._pool.reserve(request, positions):
            victim = self.running[-1]
            self._free(victim)
            victim.phase, victim.computed = Phase.WAITING, 0
            self.add(victim)
            self.preemptions += 1
            self._on_preempt(victim)
            if victim is request:
                return False
        return True

    def _free(self, request: Request) -> None:
        self._pool.release(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        self.running.remove(request)
