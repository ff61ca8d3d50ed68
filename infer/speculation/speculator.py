"""The speculator: the one owner of what is drafted for whom, and of what becomes of it.

A step calls, in this order, `plan` (what would pay), `grant` (the budget of every request, and whose state drafters
keep), `sync` (who was admitted and pre-empted), `propose`, `verified` for each draft, `commit`, and `observe` (what the
step took).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from infer.request import DrafterState, Phase, Request
from infer.speculation.budget import NOTHING, Budget, Grant, Grants, VerifiedDraft
from infer.speculation.control.batch_plan import Candidate
from infer.speculation.control.planner import PLAN_STEPS, Planner
from infer.speculation.proposers.base import NoProposer, Proposer
from infer.speculation.tree import DraftTree

log = logging.getLogger(__name__)


def grouped(names: Sequence[str]) -> list[list[int]]:
    """Return the indices of each name."""
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    return list(groups.values())


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
        limits = {"none": (NoProposer(), NOTHING), **proposers}
        self._proposers: dict[str, Proposer] = {name: proposer for name, (proposer, _) in limits.items()}
        self._limits = {name: limit for name, (_, limit) in limits.items()}
        self._context, self.default, self._timer = context, default, timer
        self.planner: Planner = Planner()
        self._idle: dict[str, int] = {}  # by request that a drafter keeps state of, steps since its last draft
        self.seconds = 0.0  # spent in proposing, in all
        self.failures = 0  # requests whose proposer failed
        if default not in self._proposers:
            raise ValueError(f"proposer={default}: this engine has {', '.join(self.names)}")

    @property
    def names(self) -> list[str]:
        return sorted(self._proposers)

    def name_for(self, request: Request) -> str:
        return "none" if request.drafter_state is DrafterState.NONE else self._drafter(request)

    def _drafter(self, request: Request) -> str:
        """Return the name of the proposer that drafts for the request whenever that pays."""
        if not request.params.speculate or request.drafting_failed:
            return "none"
        return request.params.proposer or self.default

    # ---- the decision: how much is drafted, and for whom state is kept --------------------------------------------

    def plan(self, decoding: Sequence[Request], load: int) -> None:
        """Plan the drafts of the next step. `load` counts the decoding requests and those about to join them."""
        names = tuple(request.request_id for request in decoding)
        self.planner.plan(names, lambda: self._candidates(decoding, load))

    def grant(self, decoding: Sequence[Request], admissible: Sequence[Request], load: int) -> Grants:
        """Return the budget of each decoding request in this step; start and stop tracking requests accordingly.

        `admissible`: the waiting requests that may be admitted in this step. For each of them the drafter's state is
        decided, on which it depends which cached pages it can use.
        """
        for request in admissible:
            self._on_admission(request, load)
        return {
            request.request_id: Grant(self._granted(request, load), partial(self.places, request))
            for request in decoding
        }

    def sync(self, admitted: Sequence[Request], preempted: Sequence[Request]) -> None:
        """Take note of what the scheduler did: drop the state of pre-empted requests, adopt that of cached pages.

        A request may have been pre-empted and admitted again.
        """
        for request in preempted:
            self.release(request)
        for request in admitted:
            if request.computed:
                try:
                    self._proposer_for(request).resume(request)
                except Exception as error:
                    self._give_up(request, error)

    def steady_budget(self, request: Request) -> tuple[str, Budget] | None:
        """Return which proposer drafts for the request, and its budget for as long as the request does not end.

        None if its drafter must first start tracking it.
        """
        name, drafter = self.name_for(request), self._drafter(request)
        if name != drafter and not self.planner.skips(request.request_id):
            return None
        if name == "none" or not self._proposer_for(request).ready(request):
            return name, NOTHING
        budget = self.planner.budget(request.request_id, self._within(name, request.params.max_draft_tokens))
        return ("none", NOTHING) if budget == NOTHING and not self._keeps_state(name) else (name, budget)

    def places(self, request: Request, budget: Budget) -> int:
        return self._proposer_for(request).places(budget) if budget.nodes else 0

    def budget(self, request: Request) -> Budget:
        """Return the request's largest budget: no deeper than the tokens it may still emit before the bonus token."""
        name = self._drafter(request)
        if name == "none":
            return NOTHING
        room = min(request.remaining, self._context - len(request.tokens)) - 1
        requested = request.params.max_draft_tokens
        return self._within(name, room if requested is None else min(room, requested))

    def verified(self, request: Request, draft: VerifiedDraft) -> None:
        """Record the outcome of a draft. Called before its tokens are appended to the request."""
        self.planner.record_draft(request.request_id, self.name_for(request), request.params.temperature > 0, draft)

    def observe(self, batch: int, rows: int, drafting: float | None, seconds: float) -> None:
        """Record what a step without prefill took; see `Planner.record_step`."""
        self.planner.record_step(batch, rows, drafting, seconds)

    def _within(self, name: str, depth: int | None) -> Budget:
        """Return the largest budget of this proposer that is no deeper than `depth`."""
        limit = self._limits[name]
        depth = limit.depth if depth is None else max(0, min(limit.depth, depth))
        return NOTHING if depth == 0 else Budget(depth if limit.is_chain else limit.nodes, depth)

    def _should_track(self, request: Request, load: int, unread: int = 0) -> bool:
        candidate = self._candidate(request)
        candidate = candidate._replace(allowed=self._limits[candidate.drafter])
        tokens = request.remaining - (0 if request.drafter_state is DrafterState.FULL else candidate.warm_up)
        return self.planner.should_track(candidate, load, tokens, unread)

    def _candidates(self, decoding: Sequence[Request], load: int) -> list[Candidate]:
        """Return those of these requests that may be drafted for.

        Empty if more are about to join with which drafting will not pay: during a burst of prompts only few requests
        decode, and only for a moment.
        """
        joining = load > len(decoding)
        if joining and not any(self._should_track(request, load) for request in decoding if self.budget(request).nodes):
            return []
        candidates = [(request, self._candidate(request)) for request in decoding]
        return [
            candidate._replace(worth_tracking=candidate.ready or self._should_track(request, load))
            for request, candidate in candidates
            if candidate.allowed.nodes and request.remaining > candidate.warm_up
        ]

    def _candidate(self, request: Request) -> Candidate:
        name = self._drafter(request)
        warm_up = 0 if self._is_ready(request) else 1 + self._proposers[name].warm_up
        return Candidate(request.request_id, name, self.budget(request), request.params.temperature > 0, warm_up)

    def _on_admission(self, request: Request, load: int) -> None:
        """Decide, before admission, whether the drafter tracks the request from the start. `load` counts it too.

        While nothing is drafted, the cost of speculation is this tracking: features are kept, prompts are read. So
        where drafting would not pay no request is tracked; `_granted` starts tracking one that may draft after all.
        """
        name = self._drafter(request)
        if not self._keeps_state(name):
            return
        pays = self._should_track(request, load, len(request.tokens))
        request.drafter_state = DrafterState.FULL if pays else DrafterState.NONE
        parent = request.parent
        if pays and parent is not None and parent.phase is Phase.DECODE and not self._caught_up(parent):
            request.parent = None  # the drafter's KV in its pages is incomplete

    def _caught_up(self, request: Request) -> bool:
        """Make its drafter read all committed positions; return False if it has not tracked it from the start."""
        if request.drafter_state is DrafterState.FULL:
            try:
                self._proposer_for(request).catch_up(request)
            except Exception as error:
                self._give_up(request, error)
        return request.drafter_state is DrafterState.FULL

    def _granted(self, request: Request, load: int) -> Budget:
        """Return the request's budget in this step.

        Starts tracking a request that may draft again, and releases one that has been idle for long while drafting
        does not pay. A request whose drafter is not ready gets NOTHING.
        """
        request_id = request.request_id
        skipped = self.planner.skips(request_id)
        if skipped and request.drafter_state is DrafterState.NONE:  # the common case where drafting does not pay
            return NOTHING
        granted = NOTHING if skipped else self.planner.budget(request_id, self.budget(request))
        name = self._drafter(request)
        if not self._keeps_state(name):
            return granted
        if granted.nodes:
            self._idle[request_id] = 0
            if request.drafter_state is DrafterState.NONE:
                request.drafter_state = DrafterState.PARTIAL
                try:
                    self._proposers[name].start_tracking(request)
                except Exception as error:
                    self._give_up(request, error)
            return granted if self._is_ready(request) else NOTHING
        if request.drafter_state is not DrafterState.NONE:
            self._idle[request_id] = self._idle.get(request_id, 0) + 1
            idle_too_long = self._idle[request_id] % PLAN_STEPS == 0
            if idle_too_long and not self._should_track(request, load):
                self.release(request)
                request.drafter_state = DrafterState.NONE
        return NOTHING

    def _is_ready(self, request: Request) -> bool:
        return request.drafter_state is not DrafterState.NONE and self._proposer_for(request).ready(request)

    def _keeps_state(self, name: str) -> bool:
        return self._proposers[name].keeps_state

    # ---- drafts and the state of drafters ------------------------------------------------------------------------

    def wants_features(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Return which hidden states of the target these requests' proposers read; () if none reads any."""
        return next((aux for request in requests if (aux := self._proposer_for(request).aux_layers)), ())

    def reads(self, request: Request) -> bool:
        """Return whether the request's proposer takes its features."""
        return request.drafter_state is not DrafterState.NONE and bool(self._proposer_for(request).aux_layers)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        """Return one tree per request, from whichever proposer drafts for it."""
        begin = self._timer()
        try:
            return self._propose_all(requests, budgets)
        finally:
            self.seconds += self._timer() - begin

    def _propose_all(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        trees: list[DraftTree] = []
        rows: list[list[int]] = []
        pairs = zip(requests, budgets, strict=True)
        for group in grouped([self.name_for(request) if budget.nodes else "none" for request, budget in pairs]):
            trees.append(self._propose([requests[i] for i in group], [budgets[i] for i in group]))
            rows.append(group)
        return trees[0] if len(trees) == 1 else DraftTree.stack(trees, rows)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        """Commit the `counts[b]` new positions of each request.

        `features` `[n, F]`: those of the requests whose proposers take them, one request after another.
        """
        reading = [count if self.reads(request) else 0 for request, count in zip(requests, counts, strict=True)]
        groups = grouped([self.name_for(request) for request in requests])
        pieces = features.split(reading) if len(groups) > 1 and any(reading) else ()
        for group in groups:
            batch, drafter = [requests[i] for i in group], self._proposer_for(requests[group[0]])
            all_rows = sum(reading) == sum(reading[i] for i in group)
            rows = features if all_rows or not drafter.aux_layers else torch.cat([pieces[i] for i in group])
            try:
                drafter.commit(batch, [counts[i] for i in group], rows)
            except Exception as error:  # its state of any of them can no longer be trusted
                for request in batch:
                    self._give_up(request, error)

    def read_again(self, requests: Sequence[Request], features: Tensor) -> None:
        """Make drafters read all committed positions of each request like a prompt, with these `features` `[n, F]`."""
        for request in requests:
            self._proposer_for(request).release(request)
            request.phase = Phase.PREFILL
        self.commit(requests, [request.computed for request in requests], features)
        for request in requests:
            request.phase = Phase.DECODE

    def filled_by(self, request: Request) -> str:
        """Return a name for the KV layers that the request fills.

        Requests with the same name fill the same layers of their pages, and may share them.
        """
        return self.name_for(request) if self._proposer_for(request).kv_layers else ""

    def synced(self, request: Request) -> int:
        """Return how many of its committed positions are filled in all layers that its pages are keyed by."""
        return (
            self._proposer_for(request).synced(request)
            if request.drafter_state is DrafterState.FULL
            else request.computed
        )

    def forget(self, request: Request) -> None:
        """Drop all state of a request that has ended."""
        self.release(request)
        self.planner.forget(request.request_id)

    def release(self, request: Request) -> None:
        """Drop what drafters keep of a request."""
        for proposer in self._proposers.values():
            try:
                proposer.release(request)
            except Exception:  # the request still ends, and the others continue
                log.exception("%s: proposer %s could not release its state", request.request_id, proposer.name)
        self._idle.pop(request.request_id, None)

    def _proposer_for(self, request: Request) -> Proposer:
        return self._proposers[self.name_for(request)]

    def _propose(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """Return the trees of one proposer's requests. A failure costs only the request that caused it its drafts."""
        proposer = self._proposer_for(requests[0]) if budgets[0].nodes else NoProposer()
        try:
            return proposer.propose(requests, budgets)
        except Exception as error:
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return NoProposer().propose(requests, budgets)
        pairs = zip(requests, budgets, strict=True)
        trees = [self._propose([request], [budget]) for request, budget in pairs]
        return DraftTree.stack(trees, [[index] for index in range(len(trees))])

    def _give_up(self, request: Request, error: Exception) -> None:
        name = self.name_for(request)
        log.warning("%s: proposer %s failed and no longer drafts for this request: %r", request.request_id, name, error)
        self.release(request)
        self.failures += 1
        request.drafting_failed, request.drafter_state = True, DrafterState.NONE
