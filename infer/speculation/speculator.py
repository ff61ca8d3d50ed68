"""The speculator: the one owner of what is drafted for whom, and of what becomes of it.

A request gets its drafter from `assign`. A step calls, in this order, `plan` (what would pay), `track` (whose state
drafters keep, and what they can draft), `sync` (who was admitted and pre-empted), `propose`, `verified` for each draft,
`commit`, and the planner's `record_step` (what the step took).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from infer.batch.tree import NOTHING, Budget, DraftTree, VerifiedDraft, grouped
from infer.request import PLAIN, Drafter, DrafterState, Phase, Proposer, Request
from infer.speculation.control.batch_plan import Candidate
from infer.speculation.control.planner import PLAN_STEPS, Planner

log = logging.getLogger(__name__)


class Speculator:
    """What builds the proposers by name, each with its largest budget per step, and the planner of their drafts.

    Requests cannot select other names. A proposer that fails costs its request the drafts, never a token.
    """

    def __init__(
        self,
        proposers: Mapping[str, Callable[[], tuple[Proposer, Budget]]],
        default: str,
        context: int,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._proposers = proposers
        self._context, self.default, self._timer = context, default, timer
        self.planner: Planner = Planner()
        self.seconds = 0.0  # spent in proposing, in all
        self.failures = 0  # requests whose proposer failed
        if default not in self.names:
            raise ValueError(f"proposer={default}: this engine has {', '.join(self.names)}")

    @property
    def names(self) -> list[str]:
        return sorted({"none", *self._proposers})

    def assign(self, request: Request) -> None:
        """Choose the request's drafter, before anything else is done with it."""
        name = (request.params.proposer or self.default) if request.params.speculate else "none"
        proposer, limit = (PLAIN, NOTHING) if name == "none" else self._proposers[name]()
        request.drafter = Drafter(proposer, limit, self._context)
        self._begin(request)

    # ---- queries: how much is drafted ----------------------------------------------------------------------------

    def plan(self, decoding: Sequence[Request], load: int) -> list[Budget]:
        """Return how much would pay for each request. `load` counts them and the requests that are about to join."""
        names = tuple(request.request_id for request in decoding)
        if self.planner.next_step(names):
            self.planner.plan(names, self._candidates(decoding, load))
        return [self.planner.budget(request.request_id, request.drafter.budget(request)) for request in decoding]

    def steady_budget(self, request: Request) -> tuple[str, Budget] | None:
        """Return which proposer drafts for the request, and its budget for as long as the request does not end.

        None if its drafter must first start tracking it.
        """
        drafter = request.drafter
        budget = self.planner.budget(request.request_id, drafter.steady_budget(request))
        if not drafter.tracks:
            return None if budget.nodes else ("none", NOTHING)
        budget = budget if drafter.ready(request) else NOTHING
        plain = budget == NOTHING and not drafter.proposer.needs.tracking
        return ("none", NOTHING) if plain else (drafter.name, budget)

    def wants_features(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Return which hidden states of the target these requests' proposers read; () if none reads any."""
        return next((aux for request in requests if (aux := request.drafter.aux_layers)), ())

    def _should_track(self, request: Request, load: int, unread: int = 0) -> bool:
        drafter, candidate = request.drafter, self._candidate(request)
        tokens = request.remaining - (0 if drafter.state is DrafterState.FULL else candidate.warm_up)
        return self.planner.should_track(candidate._replace(allowed=drafter.limit), load, tokens, unread)

    def _candidate(self, request: Request) -> Candidate:
        """Return what a plan of the next steps needs to know of the request."""
        drafter = request.drafter
        warm_up = 0 if drafter.ready(request) else 1 + drafter.proposer.needs.warm_up
        sampled = request.params.temperature > 0
        facts = drafter.name, drafter.budget(request), sampled, warm_up
        return Candidate(request.request_id, *facts, history=drafter.history)

    def _candidates(self, decoding: Sequence[Request], load: int) -> list[Candidate]:
        """Return those of these requests that may be drafted for.

        Empty if more are about to join with which drafting will not pay: during a burst of prompts only few requests
        decode, and only for a moment.
        """
        pairs = [(request, self._candidate(request)) for request in decoding]
        pairs = [(request, candidate) for request, candidate in pairs if candidate.allowed.nodes]
        if load > len(decoding) and not any(self._should_track(request, load) for request, _ in pairs):
            return []
        return [
            candidate._replace(worth_tracking=candidate.ready or self._should_track(request, load))
            for request, candidate in pairs
            if request.remaining > candidate.warm_up
        ]

    # ---- whose state drafters keep -------------------------------------------------------------------------------

    def track(
        self, decoding: Sequence[Request], planned: Sequence[Budget], admissible: Sequence[Request], load: int
    ) -> list[Budget]:
        """Start and stop tracking requests as the plan asks; return how much each decoding one can draft.

        `admissible`: the waiting requests that may be admitted in this step. For each of them the drafter's state is
        decided, on which it depends which cached pages it can use. A drafter that is not ready gets NOTHING.
        """
        for request in admissible:
            self._decide_state(request, load)
        for request, budget in zip(decoding, planned, strict=True):
            drafter = request.drafter
            if budget.nodes and drafter.tracks:
                drafter.idle = 0
            elif drafter.proposer.needs.tracking:
                self._start_or_stop(drafter, request, budget, load)
        pairs = zip(decoding, planned, strict=True)
        return [budget if request.drafter.ready(request) else NOTHING for request, budget in pairs]

    def _start_or_stop(self, drafter: Drafter, request: Request, budget: Budget, load: int) -> None:
        """Start tracking a request that is to draft; stop after some steps without drafts, if tracking does not pay."""
        drafter.idle += drafter.tracks
        idle = drafter.idle and drafter.idle % PLAN_STEPS == 0 and not self._should_track(request, load)
        if budget.nodes or idle:
            drafter.state = DrafterState.PARTIAL if budget.nodes else DrafterState.NONE
            self._begin(request)

    def _decide_state(self, request: Request, load: int) -> None:
        """Decide, before admission, whether the drafter tracks the request from the start. `load` counts it too.

        While nothing is drafted, the cost of speculation is this tracking: features are kept, prompts are read. So
        where drafting would not pay no request is tracked; `track` starts with one that may draft after all.
        """
        drafter, parent = request.drafter, request.parent
        if not drafter.proposer.needs.tracking:
            return
        pays = self._should_track(request, load, len(request.tokens))
        drafter.state = DrafterState.FULL if pays else DrafterState.NONE
        if pays and parent is not None and parent.phase is Phase.DECODE:
            if parent.drafter.state is DrafterState.FULL:
                with self._or_give_up(parent):
                    parent.drafter.proposer.catch_up(parent, parent.drafter.kept)
            if parent.drafter.state is not DrafterState.FULL:
                request.parent = None  # the drafter's KV in its pages is incomplete

    def sync(self, admitted: Sequence[Request], preempted: Sequence[Request]) -> None:
        """Take note of what the scheduler did: drop the state of pre-empted requests, adopt that of cached pages.

        A request may have been pre-empted and admitted again.
        """
        for request in (*preempted, *(request for request in admitted if request.computed)):
            self._begin(request)

    def _begin(self, request: Request) -> None:
        with self._or_give_up(request):
            request.drafter.begin(request)

    def commit(self, requests: Sequence[Request], features: Sequence[Tensor]) -> None:
        """Commit the new positions of each request, `features[b]` `[n, F]` of n positions."""
        groups = grouped([request.drafter.proposer if request.drafter.tracks else PLAIN for request in requests])
        for proposer, group in groups.items():
            batch = [requests[b] for b in group]
            try:
                proposer.commit(batch, [r.drafter.kept for r in batch], [features[b] for b in group])
            except Exception as error:  # its state of any of them can no longer be trusted
                for request in batch:
                    self._give_up(request, error)

    def forget(self, request: Request) -> None:
        """Drop all state of a request that has ended."""
        try:
            request.drafter.kept.end(request)
        except Exception:
            log.exception("%s: proposer %s could not take note of its end", request.request_id, request.drafter.name)
        request.drafter = Drafter(state=request.drafter.state)

    @contextmanager
    def _or_give_up(self, request: Request) -> Iterator[None]:
        """If the block raises, nothing is drafted for the request any more."""
        try:
            yield
        except Exception as error:
            self._give_up(request, error)

    def _give_up(self, request: Request, error: Exception) -> None:
        text = "%s: proposer %s failed and no longer drafts for this request: %r"
        log.warning(text, request.request_id, request.drafter.name, error)
        self.failures += 1
        request.drafter = Drafter(state=DrafterState.NONE)

    # ---- drafts and their outcome --------------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        """Return one tree per request, from whichever proposer drafts for it."""
        begin, pairs = self._timer(), list(zip(requests, budgets, strict=True))
        proposers = [request.drafter.proposer if budget.nodes else PLAIN for request, budget in pairs]
        try:
            return DraftTree.by_group(proposers, lambda each, rows: self._propose(each, [pairs[b] for b in rows]))
        finally:
            self.seconds += self._timer() - begin

    def _propose(self, proposer: Proposer, pairs: list[tuple[Request, Budget]]) -> DraftTree:
        """Return the trees of one proposer's requests. A failure costs only the request that caused it its drafts."""
        requests, budgets = [request for request, _ in pairs], [budget for _, budget in pairs]
        states = [request.drafter.kept for request in requests]
        try:
            return proposer.propose(requests, states, budgets)
        except Exception as error:
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return PLAIN.propose(requests, states, budgets)
            return DraftTree.by_group(pairs, lambda pair, _: self._propose(proposer, [pair]))

    def verified(self, request: Request, draft: VerifiedDraft) -> None:
        """Record the outcome of a draft. Called before its tokens are appended to the request."""
        drafter, sampled = request.drafter, request.params.temperature > 0
        self.planner.record_draft(drafter.history, drafter.name, sampled, draft)
