"""The speculator: the one owner of what is drafted for whom, and of what becomes of it.

A request gets its drafter from `assign`. A step calls, in this order, `plan` (what would pay), `track` (whose state
drafters keep, and what they can draft), `sync` (who was admitted and pre-empted), `propose`, `verified` for each draft,
`commit`, and the planner's `record_step` (what the step took).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from infer.request import DrafterState, Phase, Request
from infer.speculation.control.batch_plan import Candidate
from infer.speculation.control.planner import PLAN_STEPS, Planner
from infer.speculation.drafter import Drafter, drafter_of
from infer.speculation.proposers.base import NoProposer, Proposer
from infer.speculation.tree import NOTHING, Budget, DraftTree, VerifiedDraft

log = logging.getLogger(__name__)
T = TypeVar("T", bound=Hashable)
PLAIN = NoProposer()


def grouped(keys: Sequence[T]) -> dict[T, list[int]]:
    """Return the indices of each key."""
    groups: dict[T, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return groups


class Speculator:
    """Proposers by name, each with its largest budget per step, and the planner of their drafts.

    Requests cannot select other names. A proposer that fails costs its request the drafts, never a token.
    """

    def __init__(
        self,
        proposers: Mapping[str, tuple[Proposer, Budget]],
        default: str,
        context: int,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._proposers: dict[str, tuple[Proposer, Budget]] = {"none": (PLAIN, NOTHING), **proposers}
        self._context, self.default, self._timer = context, default, timer
        self.planner: Planner = Planner()
        self.seconds = 0.0  # spent in proposing, in all
        self.failures = 0  # requests whose proposer failed
        if default not in self._proposers:
            raise ValueError(f"proposer={default}: this engine has {', '.join(self.names)}")

    @property
    def names(self) -> list[str]:
        return sorted(self._proposers)

    def assign(self, request: Request) -> None:
        """Choose the request's drafter, before anything else is done with it."""
        name = (request.params.proposer or self.default) if request.params.speculate else "none"
        proposer, limit = self._proposers[name]
        request.drafter = Drafter(proposer, limit, self._context)

    # ---- queries: how much is drafted ----------------------------------------------------------------------------

    def plan(self, decoding: Sequence[Request], load: int) -> list[Budget]:
        """Return how much would pay for each request. `load` counts them and the requests that are about to join."""
        names = tuple(request.request_id for request in decoding)
        if self.planner.next_step(names):
            self.planner.plan(names, self._candidates(decoding, load))
        return [self.planner.budget(request.request_id, drafter_of(request).budget(request)) for request in decoding]

    def steady_budget(self, request: Request) -> tuple[str, Budget] | None:
        """Return which proposer drafts for the request, and its budget for as long as the request does not end.

        None if its drafter must first start tracking it.
        """
        drafter = drafter_of(request)
        budget = self.planner.budget(request.request_id, drafter.steady_budget(request))
        if not drafter.tracks:
            return None if budget.nodes else ("none", NOTHING)
        budget = budget if drafter.ready(request) else NOTHING
        return ("none", NOTHING) if budget == NOTHING and drafter.tracker is None else (drafter.name, budget)

    def wants_features(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Return which hidden states of the target these requests' proposers read; () if none reads any."""
        return next((aux for request in requests if (aux := request.drafter.aux_layers)), ())

    def _should_track(self, request: Request, load: int, unread: int = 0) -> bool:
        drafter = drafter_of(request)
        candidate = drafter.candidate(request)
        tokens = request.remaining - (0 if drafter.state is DrafterState.FULL else candidate.warm_up)
        return self.planner.should_track(candidate._replace(allowed=drafter.limit), load, tokens, unread)

    def _candidates(self, decoding: Sequence[Request], load: int) -> list[Candidate]:
        """Return those of these requests that may be drafted for.

        Empty if more are about to join with which drafting will not pay: during a burst of prompts only few requests
        decode, and only for a moment.
        """
        pairs = [(request, drafter_of(request).candidate(request)) for request in decoding]
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
            drafter = drafter_of(request)
            if budget.nodes and drafter.tracks:
                drafter.idle = 0
            elif drafter.proposer.tracker is not None:
                self._start_or_stop(drafter, request, budget, load)
        pairs = zip(decoding, planned, strict=True)
        return [budget if drafter_of(request).ready(request) else NOTHING for request, budget in pairs]

    def _start_or_stop(self, drafter: Drafter, request: Request, budget: Budget, load: int) -> None:
        """Start tracking a request that is to draft; stop after some steps without drafts, if tracking does not pay."""
        drafter.idle = 0 if budget.nodes else drafter.idle + drafter.tracks
        if budget.nodes:
            with self._or_give_up(request):
                drafter.start_tracking(request)
        elif drafter.idle and drafter.idle % PLAN_STEPS == 0 and not self._should_track(request, load):
            drafter.stop_tracking(request)

    def _decide_state(self, request: Request, load: int) -> None:
        """Decide, before admission, whether the drafter tracks the request from the start. `load` counts it too.

        While nothing is drafted, the cost of speculation is this tracking: features are kept, prompts are read. So
        where drafting would not pay no request is tracked; `track` starts with one that may draft after all.
        """
        drafter, parent = drafter_of(request), request.parent
        if drafter.proposer.tracker is None:
            return
        pays = self._should_track(request, load, len(request.tokens))
        drafter.state = DrafterState.FULL if pays else DrafterState.NONE
        if pays and parent is not None and parent.phase is Phase.DECODE:
            with self._or_give_up(parent):
                drafter_of(parent).catch_up(parent)
            if parent.drafter.state is not DrafterState.FULL:
                request.parent = None  # the drafter's KV in its pages is incomplete

    def sync(self, admitted: Sequence[Request], preempted: Sequence[Request]) -> None:
        """Take note of what the scheduler did: drop the state of pre-empted requests, adopt that of cached pages.

        A request may have been pre-empted and admitted again.
        """
        for request in preempted:
            drafter_of(request).release(request)
        for request in admitted:
            with self._or_give_up(request):
                drafter_of(request).resume(request)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        """Commit the `counts[b]` new positions of each request.

        `features` `[n, F]`: those of the requests whose proposers take them, one request after another.
        """
        by_tracker = grouped([drafter_of(request).tracker for request in requests])
        groups = {tracker: group for tracker, group in by_tracker.items() if tracker is not None}
        taken = [count if request.drafter.aux_layers else 0 for request, count in zip(requests, counts, strict=True)]
        pieces = features.split(taken) if len(groups) > 1 else ()
        for tracker, group in groups.items():
            batch = [requests[i] for i in group]
            rows = torch.cat([pieces[i] for i in group]) if pieces else features
            try:
                tracker.commit(batch, [counts[i] for i in group], rows)
            except Exception as error:  # its state of any of them can no longer be trusted
                for request in batch:
                    self._give_up(request, error)

    def forget(self, request: Request) -> None:
        """Drop all state of a request that has ended."""
        drafter_of(request).release(request)
        self.planner.forget(request.request_id)

    @contextmanager
    def _or_give_up(self, request: Request) -> Iterator[None]:
        """If the block raises, nothing is drafted for the request any more."""
        try:
            yield
        except Exception as error:
            self._give_up(request, error)

    def _give_up(self, request: Request, error: Exception) -> None:
        drafter = drafter_of(request)
        text = "%s: proposer %s failed and no longer drafts for this request: %r"
        log.warning(text, request.request_id, drafter.name, error)
        drafter.release(request)
        self.failures += 1
        request.drafter = Drafter(PLAIN, NOTHING, self._context)
        request.drafter.state = DrafterState.NONE

    # ---- drafts and their outcome --------------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        """Return one tree per request, from whichever proposer drafts for it."""
        begin = self._timer()
        pairs = zip(requests, budgets, strict=True)
        groups = grouped([drafter_of(request).proposer if budget.nodes else PLAIN for request, budget in pairs])
        try:
            trees = [
                self._propose(proposer, [requests[i] for i in group], [budgets[i] for i in group])
                for proposer, group in groups.items()
            ]
            return trees[0] if len(trees) == 1 else DraftTree.stack(trees, list(groups.values()))
        finally:
            self.seconds += self._timer() - begin

    def _propose(self, proposer: Proposer, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """Return the trees of one proposer's requests. A failure costs only the request that caused it its drafts."""
        try:
            return proposer.propose(requests, budgets)
        except Exception as error:
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return PLAIN.propose(requests, budgets)
            pairs = zip(requests, budgets, strict=True)
            trees = [self._propose(proposer, [request], [budget]) for request, budget in pairs]
            return DraftTree.stack(trees, [[index] for index in range(len(trees))])

    def verified(self, request: Request, draft: VerifiedDraft) -> None:
        """Record the outcome of a draft. Called before its tokens are appended to the request."""
        name, sampled = drafter_of(request).name, request.params.temperature > 0
        self.planner.record_draft(request.request_id, name, sampled, draft)
