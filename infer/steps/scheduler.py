"""Schedules the requests of a step: admission, chunked prefill, page reservation, pre-emption. Uses no tensors."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from infer.batch.tree import NOTHING, Budget
from infer.kvcache.pool import KVPool
from infer.request import Phase, Request


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
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Return the largest number of rows that its target forwards can have, together."""
        return len(self.decodes) + sum(budget.nodes for budget in self.budgets) + sum(self.chunks)

    def drop_preempted(self) -> None:
        """Leave out the decodes that were pre-empted for another after they had been scheduled."""
        kept = [index for index, request in enumerate(self.decodes) if request.phase is Phase.DECODE]
        self.decodes, self.budgets = [self.decodes[index] for index in kept], [self.budgets[index] for index in kept]


class Scheduler:
    """Serves higher priority first, then first come, first served.

    When pages run out, the last running request in this order is pre-empted: its pages are freed, and later it is
    recomputed from its tokens by the same kernels, so with the same bits.
    """

    def __init__(self, pool: KVPool, *, max_batch: int, max_rows: int, prefill_chunk: int) -> None:
        self._pool, self._max_batch, self._max_rows, self._chunk = pool, max_batch, max_rows, prefill_chunk
        self._free_rows = list(range(max_batch - 1, -1, -1))
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
        """Return whether a waiting request could start: a row is free, and pages for the next one may be."""
        return bool(self.waiting and self._free_rows and not self._short)

    @property
    def load(self) -> int:
        """Number of requests that will soon decode together: running ones, and waiting ones that may be admitted."""
        return min(len(self.running) + (len(self.waiting) if self.may_admit else 0), self._max_batch)

    @property
    def decoding(self) -> list[Request]:
        return [request for request in self.running if request.phase is Phase.DECODE]

    def admissible(self) -> list[Request]:
        """Return the waiting requests that the next step may admit, in order; as long as pages are short, the first."""
        ready = [request for request in self.waiting if request.parent is None or prompt_is_ready(request.parent)]
        return ready[: min(len(self._free_rows), 1 if self._short else len(ready))]

    def schedule(self, decodes: Sequence[Request], budgets: Sequence[Budget], admissible: Sequence[Request]) -> Step:
        """Choose the work of the next step and reserve its pages.

        The `decodes` come first: they hold memory, and users are waiting for their tokens. Each is guaranteed its
        root's row; rows that are not set aside for prompts are shared among their drafts, up to each one's budget.
        """
        step, rows = Step(), self._max_rows - len(decodes)
        prompts = self.waiting or len(decodes) < len(self.running)
        spare = rows - (min(self._chunk, rows // 2) if prompts else 0)
        for index, (request, budget) in enumerate(zip(decodes, budgets, strict=True)):
            if request.phase is not Phase.DECODE:
                continue  # pre-empted in this loop for an earlier request
            budget = budget.within(spare // (len(decodes) - index))
            if not self._pool.reserve(request, len(request.tokens) + request.drafter.places(budget)):
                budget = NOTHING
                if not self._reserve_or_preempt(request, len(request.tokens), step):
                    continue
            step.decodes.append(request)
            step.budgets.append(budget)
            spare -= budget.nodes
        rows = self._max_rows - step.rows
        if step.preempted:
            step.drop_preempted()
        if self.waiting or len(step.decodes) < len(self.running):
            self._schedule_prompts(step, rows, admissible)
        return step

    def _schedule_prompts(self, step: Step, rows: int, admissible: Sequence[Request]) -> None:
        """Add to the step, within `rows`, the next chunks of prompts, and the requests that can be admitted."""
        for request in [r for r in self.running if r.phase is Phase.PREFILL]:
            chunk = self._pool.chunk(request, min(self._chunk, rows))
            if chunk > 0 and self._pool.reserve(request, request.computed + chunk):
                step.prefills.append(request)
                step.chunks.append(chunk)
                rows -= chunk
        # A request that was just pre-empted may fit at once, before its cached pages are evicted.
        for request in sorted([*admissible, *step.preempted], key=order):
            if not self._free_rows or rows < 1:
                break
            if request.parent is not None and not prompt_is_ready(request.parent):
                continue  # it was pre-empted in this step
            cached = self._pool.cached_prefix(request)
            # The whole prompt must fit beside the running requests, or it would soon be pre-empted again.
            if self._pool.pages_for(len(request.tokens) + 1) - len(cached) > self._pool.pages.free_without(cached):
                self._short = True
                break
            self._short = False
            self._admit(request, cached)
            step.admitted.append(request)
            reserved = self._pool.reserve(request, len(request.tokens))
            assert reserved
            chunk = self._pool.chunk(request, min(self._chunk, rows))
            step.prefills.append(request)
            step.chunks.append(chunk)
            rows -= chunk

    def _admit(self, request: Request, cached: list[int]) -> None:
        self.waiting.remove(request)
        request.table_row, request.phase, request.computed = self._free_rows.pop(), Phase.PREFILL, 0
        request.published = 0
        bisect.insort(self.running, request, key=order)
        request.last_features = None
        request.page_ends.clear()
        parent, request.parent = request.parent, None
        if parent is not None and parent.phase is Phase.DECODE:
            self._pool.fork(parent, request)
        else:
            self._pool.adopt(request, cached)
        if not request.output_length:  # after a pre-emption the cached pages may be its own
            request.cached = request.computed

    def _reserve_or_preempt(self, request: Request, positions: int, step: Step) -> bool:
        """Pre-empt the last in order until the pages are free; False if the request itself was pre-empted."""
        while not self._pool.reserve(request, positions):
            victim = self.running[-1]
            self._free(victim)
            victim.preempt()
            self.add(victim)
            self.preemptions += 1
            step.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _free(self, request: Request) -> None:
        self._pool.release(request)
        self._free_rows.append(request.table_row)
        request.table_row = -1
        self.running.remove(request)
