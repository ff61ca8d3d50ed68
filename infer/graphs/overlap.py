"""The host one step behind: the next round of the same requests is launched before this one's answer is read.

While requests only decode and nothing about them needs the host, a round needs nothing that the host learns from the
one before it (infer/graphs/round_graphs.py). So the host reads round r, emits its tokens and finds who has ended while
round r + 1 runs. What r + 1 makes for a request that ended in r is dropped. Whatever else is to be done - a prompt, a
grammar, another draft length, scarce pages - waits until the round in flight has been read, and is done step by step.

A round in flight writes past what is committed alone, so nothing that others could see is touched. The pages of a
request that ended go to others in a step, which begins once the round has been read, or in a round launched after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from infer.engine.scheduler import Scheduler
from infer.engine.step import Stepping
from infer.graphs.round_graphs import Launched, RoundGraphs
from infer.kvcache.pool import KVPool
from infer.request import Phase, Request, StepOutput
from infer.speculation.budget import NOTHING, Budget, Verified
from infer.speculation.control.planner import Planner
from infer.speculation.speculator import Drafting


class Batch(NamedTuple):
    """Requests that could go on by themselves in these graphs, and how far each is drafted for."""

    requests: list[Request]
    graphs: RoundGraphs
    budget: Budget


class Timed(NamedTuple):
    """A round of one graph, whose drafts cannot be told from the rest of it."""

    batch: int
    rows: int
    drafting: None
    seconds: float


def needs_host(request: Request) -> bool:
    """Whether the host must have a hand in its choices, or in what is accepted, between two rounds."""
    params = request.params
    return (
        request.phase is not Phase.DECODE
        or request.rule != "exact"
        or request.constraint is not None
        or params.shapes_logits
        or params.logprobs is not None
    )


def final_length(request: Request, context: int) -> int:
    """Tokens, prompt and output, that the request cannot have more of."""
    return min(len(request.prompt_ids) + request.params.max_tokens, context)


class Rounds:
    """Steps of an engine by `graphs`, of one drafter or none each, one round ahead of what has been read."""

    def __init__(
        self,
        graphs: Sequence[RoundGraphs],
        pool: KVPool,
        scheduler: Scheduler,
        drafting: Drafting,
        stepping: Stepping,
        *,
        context: int,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._by_drafter = {own.drafter: own for own in graphs}
        self._graphs = graphs[0]  # in use
        self._pool, self._scheduler = pool, scheduler
        self._drafting, self._stepping, self._context, self._timer = drafting, stepping, context, timer
        self._rows: list[Request | None] = []  # by row of the state; None where it has ended
        self._budget = NOTHING
        self._flying: Launched | None = None
        self._read: float | None = None  # when the round before the one in flight was
        self.timed: Timed | None = None  # the round of the last step, if another one flew before and after it

    @property
    def most_rows(self) -> int:
        """Of the target in a round."""
        return max(own.most_rows for own in self._by_drafter.values())

    def step(self, planner: Planner) -> list[StepOutput] | None:
        """Reads a round and, if they can go on, has launched the next one. None, with nothing done, where the engine
        must take the step itself.
        """
        batch, self.timed = self._steady(planner), None
        if self._flying is None:
            if batch is None or not self._begin(batch):
                return None
        elif batch is None or not self._goes_on(batch):
            return self.land()
        if not self._make_room(unread=1):
            return self.land()
        landing, self._flying = self._flying, self._graphs.launch()
        assert landing is not None
        begun = len(self._alive)
        outputs, kept = self._take(landing)
        self._time(begun)
        for row, request, count in kept:
            self._pool.keep_features(request, count, self._graphs.features(row, count, behind=True))
        # The round in flight reads these features, so what it fills of these pages is filled before anyone can look.
        self._stepping.publish([request for _, request, _ in kept])
        return outputs

    def land(self) -> list[StepOutput]:
        """Reads the round in flight, if there is one, and leaves requests and drafters as a step does."""
        landing, self._flying, self._read = self._flying, None, None
        if landing is None:
            return []
        outputs, kept = self._take(landing)
        if kept:
            rows = [self._graphs.features(row, count, behind=False) for row, _, count in kept]
            self._stepping.commit([own for _, own, _ in kept], [count for *_, count in kept], torch.cat(rows))
        self._rows = []
        return outputs

    def leave(self, request: Request) -> None:
        """It has ended, by what was read or from outside. What a round in flight makes for it is dropped."""
        if request in self._rows:
            row = self._rows.index(request)
            self._rows[row] = None
            self._graphs.leave(row)

    def _steady(self, planner: Planner) -> Batch | None:
        requests = self._scheduler.running
        if not requests or self._scheduler.may_admit or any(map(needs_host, requests)):
            return None
        ways = {self._drafting.settled(request, planner) for request in requests}
        way = next(iter(ways))
        graphs = None if way is None or len(ways) > 1 else self._by_drafter.get(way[0])
        if way is None or graphs is None or way[1] not in graphs.budgets:
            return None
        return Batch(list(requests), graphs, way[1])

    def _begin(self, batch: Batch) -> bool:
        """Loads the state and launches a first round; False if there is no graph, or no room, for it."""
        self._graphs, requests = batch.graphs, batch.requests
        proposer = self._graphs.proposer
        if self._graphs.batch_for(len(requests)) is None:
            return False
        if proposer is not None and max(map(len, proposer.features(requests))) > self._graphs.width:
            return False  # one step reads them
        self._rows, self._budget = list[Request | None](requests), batch.budget
        if not self._make_room(unread=0):
            self._rows = []
            return False
        limits = [final_length(request, self._context) - 1 for request in requests]
        self._graphs.load(requests, limits, batch.budget)
        if proposer is not None:
            proposer.was_read(requests)
        self._flying = self._graphs.launch()
        return True

    def _goes_on(self, batch: Batch) -> bool:
        """Whether these are the requests in flight, in a graph that is not too large for them."""
        fits = self._graphs.batch_for(len(batch.requests)) == self._graphs.batch_for(len(self._rows))
        same = batch.graphs is self._graphs and batch.budget == self._budget
        return fits and same and batch.requests == self._alive

    def _time(self, batch: int) -> None:
        """A round of so many has been read while the next one runs: what passed since the one before was read is a
        round's time, whatever else the host did.
        """
        now, before = self._timer(), self._read
        self._read = now
        if before is not None:
            self.timed = Timed(batch, batch * self._graphs.rows(self._budget), None, now - before)

    @property
    def _alive(self) -> list[Request]:
        return [request for request in self._rows if request is not None]

    def _make_room(self, *, unread: int) -> bool:
        """Reserves pages for one more round after `unread` ones, without taking any from others; False if there are
        none, if its rows reach too far, or if all end before it.
        """
        emitted, places = unread * (1 + self._budget.depth), self._drafting.places
        for request in self._alive:
            final = final_length(request, self._context)
            begins = min(len(request.tokens) + emitted, final)
            if begins + self._graphs.reach > self._graphs.longest:
                return False
            if not self._pool.reserve(request, begins + places(request, self._budget)):
                return False
        return any(final_length(own, self._context) - len(own.tokens) > unread for own in self._alive)

    def _take(self, landing: Launched) -> tuple[list[StepOutput], list[tuple[int, Request, int]]]:
        """Emits a round's tokens. Besides: row, request and number of new positions of each request that goes on."""
        outputs: list[StepOutput] = []
        kept: list[tuple[int, Request, int]] = []
        for row, (request, found) in enumerate(zip(self._rows, landing.read(), strict=False)):
            if request is None:
                continue
            # As in a step, a draft is no deeper than tokens may still be emitted: the rest of it is not counted.
            depth = min(found.depth, final_length(request, self._context) - len(request.tokens) - 1)
            drafted = depth if self._budget.is_chain else found.drafted
            draft = Verified(self._budget, drafted, depth, found.path[:depth])
            outputs.append(self._stepping.advance(request, found.tokens, draft))
            if request.finish_reason is None:
                kept.append((row, request, len(found.tokens)))
        return outputs, kept
