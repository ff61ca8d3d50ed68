"""Overlap scheduling: the next round of the same requests is launched before the results of this one are read.

A round is a captured decode step. While requests only decode and none of them needs the host, a round depends on
nothing that the host learns from the previous round (infer/graphs/step_graph.py). So while round r + 1 runs, the host
reads round r, emits its tokens and determines which requests have finished. What r + 1 computes for a request that
finished in r is discarded. Each request has its own draft budget, which may change from round to round. Any other work
(a prompt, a grammar, a shortage of pages) waits until the round in flight has been drained, and is then done by
ordinary steps.

A round in flight writes only past the committed positions, so it changes no KV that another request could read. Pages
of a finished request are reused only by a step, which begins after the round has been drained, or by a later round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infer.batch.tree import NOTHING, Budget, VerifiedDraft
from infer.graphs.step_graph import Launched, Outcome, StepGraphs
from infer.request import Phase, Request, StepOutput
from infer.steps.step import StepRunner


class Batch(NamedTuple):
    """Requests that can run in these graphs without the host, and the draft budget of each."""

    requests: list[Request]
    graphs: StepGraphs
    budgets: list[Budget]


def needs_host(request: Request) -> bool:
    """Return whether sampling or acceptance for this request needs the host between two rounds."""
    params = request.params
    return (
        request.phase is not Phase.DECODE
        or request.rule != "exact"
        or request.constraint is not None
        or params.shapes_logits
        or params.logprobs is not None
    )


def final_length(request: Request, context: int) -> int:
    """Return the greatest length that the request can reach, prompt and output together, in tokens."""
    return min(len(request.prompt_ids) + request.params.max_tokens, context)


class Overlap:
    """Runs an engine's steps one round ahead of what was read, by `graphs` that each serve one drafter, or none."""

    def __init__(self, graphs: Sequence[StepGraphs], steps: StepRunner) -> None:
        self._by_drafter = {g.drafter: g for g in graphs}
        self._graphs: StepGraphs  # of the round in flight
        self._steps, self._pool, self._scheduler = steps, steps.pool, steps.scheduler
        self._speculator, self._context, self._timer = steps.speculator, steps.context, steps.timer
        self._rows: list[Request | None] = []  # by row of the graph state; None once the request has finished
        self._budgets: list[Budget] = []  # likewise; of the next round
        self._in_flight: Launched | None = None
        self._read_at: float | None = None  # time at which the round before the one in flight was read
        self.timed: tuple[int, int, None, float] | None = None  # if rounds were in flight before and after the last

    @property
    def most_rows(self) -> int:
        """Return the largest number of rows of a target forward in any round."""
        return max((graphs.most_rows for graphs in self._by_drafter.values()), default=0)

    def graphs_of(self, drafter: str) -> StepGraphs | None:
        """Return the graphs in which `drafter` drafts, "none" for those of plain steps."""
        return self._by_drafter.get(drafter)

    def step(self) -> list[StepOutput] | None:
        """Read the round in flight, after launching the next one if the same requests can continue.

        Returns None, with nothing done, if the engine must run the step itself.
        """
        batch, self.timed = self._steady(), None
        if self._in_flight is None:
            if batch is None or not self._begin(batch):
                return None
        elif batch is None or not self._continues(batch):
            return self.drain()
        if not self._make_room(self._in_flight):
            return self.drain()
        self._graphs.set_budgets(self._rows, self._budgets)
        results, self._in_flight = self._in_flight, self._graphs.launch()
        assert results is not None
        outcomes = results.read()
        drafted = [outcome.drafted for request, outcome in zip(self._rows, outcomes, strict=False) if request]
        outputs, unfinished = self._emit(outcomes, results.budgets)
        self._time(len(drafted), len(drafted) + sum(drafted))
        for row, request, count in unfinished:
            self._pool.keep_features(request, self._graphs.features(row, count, behind=True))
        # The round in flight reads these features, so it fills the head's KV of these pages before any later reader.
        self._steps.publish([request for _, request, _ in unfinished])
        return outputs

    def drain(self) -> list[StepOutput]:
        """Drain the round in flight, if there is one: requests and drafters are then as after an ordinary step."""
        results, self._in_flight, self._read_at = self._in_flight, None, None
        if results is None:
            return []
        outputs, unfinished = self._emit(results.read(), results.budgets)
        if unfinished:
            features = [self._graphs.features(row, count, behind=False) for row, _, count in unfinished]
            self._steps.commit([request for _, request, _ in unfinished], features)
        self._rows = []
        return outputs

    def drop(self, request: Request) -> None:
        """Drop a request that has finished or was aborted. What the round in flight computes for it is discarded."""
        if request in self._rows:
            row = self._rows.index(request)
            self._rows[row] = None
            self._graphs.leave(row)

    def _steady(self) -> Batch | None:
        requests = self._scheduler.running
        if not requests or self._scheduler.may_admit or any(map(needs_host, requests)):
            return None
        budgets, drafters = list[Budget](), set[str]()
        for request in requests:
            steady = self._speculator.steady_budget(request)
            if steady is None:
                return None
            drafters.add(steady[0])
            budgets.append(steady[1])
        drafter = next(iter(sorted(drafters - {"none"})), "none")  # plain decoding is a draft of nothing
        graphs = self._by_drafter.get(drafter)
        if graphs is None or len(drafters - {"none"}) > 1 or (drafter != "none" and not any(map(any, budgets))):
            return None
        if any(budget.nodes > graphs.limit.nodes or budget.depth > graphs.limit.depth for budget in budgets):
            return None
        return Batch(list(requests), graphs, budgets)

    def _begin(self, batch: Batch) -> bool:
        """Load the state of these requests and launch their first round. False if no graph or too few pages fit."""
        self._graphs, requests = batch.graphs, batch.requests
        proposer = self._graphs.proposer
        if self._graphs.batch_for(len(requests)) is None:
            return False
        drafters = [request.drafter for request in requests]
        states = [drafter.kept if drafter.proposer is proposer and drafter.tracks else None for drafter in drafters]
        for request, state in zip(requests, states, strict=True):
            # Of more unread features than a round can read, an ordinary step reads some.
            if state is not None and not (state.ready(request) and len(state.rows) <= self._graphs.width):
                return False
        # Under the exact rule drafting uses the noise of the target's sampling, so both have the same parameters.
        assert all(request.rule == "exact" for request in requests)
        self._rows, self._budgets = list[Request | None](requests), batch.budgets
        if not self._make_room(None):
            self._rows = []
            return False
        limits = [final_length(request, self._context) - 1 for request in requests]
        self._graphs.load(requests, states, limits, batch.budgets)
        for state in states:
            if state is not None:
                state.read = True
        self._in_flight = self._graphs.launch()
        return True

    def _continues(self, batch: Batch) -> bool:
        """Return whether these are the requests in flight, in the same graphs and batch bucket. Sets their budgets."""
        if batch.graphs is not self._graphs or batch.requests != self._active:
            return False
        budgets = iter(batch.budgets)
        self._budgets = [NOTHING if request is None else next(budgets) for request in self._rows]
        return self._graphs.batch_for(len(batch.requests)) == self._graphs.batch_for(len(self._rows))

    def _time(self, batch: int, rows: int) -> None:
        """Set `timed` after a round of `batch` requests was read while the next one runs.

        The time between two such reads is the duration of a round, whatever else the host did meanwhile.
        """
        now, before = self._timer(), self._read_at
        self._read_at = now
        if before is not None:
            self.timed = batch, rows, None, now - before

    @property
    def _active(self) -> list[Request]:
        return [request for request in self._rows if request is not None]

    def _make_room(self, unread: Launched | None) -> bool:
        """Reserve pages for one more round after the `unread` one, without pre-empting any request.

        Returns False if the pool is short of pages, if rows would exceed the context of the graphs, or if every
        request finishes before that round.
        """
        for row, request in enumerate(self._rows):
            if request is None:
                continue
            emitted = 0 if unread is None else 1 + unread.budgets[row].depth
            begins = min(len(request.tokens) + emitted, final_length(request, self._context))
            if begins + self._graphs.reach > self._graphs.longest:
                return False
            if not self._pool.reserve(request, begins + request.drafter.places(self._budgets[row])):
                return False
        least = 0 if unread is None else 1
        return any(final_length(r, self._context) - len(r.tokens) > least for r in self._active)

    def _emit(
        self, outcomes: Sequence[Outcome], budgets: Sequence[Budget]
    ) -> tuple[list[StepOutput], list[tuple[int, Request, int]]]:
        """Emit a round's tokens. Returns outputs, and (row, request, new positions) of each unfinished request."""
        outputs: list[StepOutput] = []
        unfinished: list[tuple[int, Request, int]] = []
        proposer = self._graphs.proposer
        confidence = None if proposer is None else proposer.confidence
        for row, (request, result, budget) in enumerate(zip(self._rows, outcomes, budgets, strict=False)):
            if request is None:
                continue
            # As in an ordinary step, only as many drafted levels count as the request may still emit tokens.
            depth = min(result.depth, final_length(request, self._context) - len(request.tokens) - 1)
            if confidence is not None and confidence.scoring and result.log_probs:
                confidence.record(request, budget.depth, result.log_probs)
            draft = VerifiedDraft(budget, depth if budget.is_chain else result.drafted, depth, result.path[:depth])
            outputs.append(self._steps.advance(request, result.tokens, draft))
            if request.finish_reason is None:
                unfinished.append((row, request, len(result.tokens)))
        return outputs, unfinished
