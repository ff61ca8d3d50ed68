"""Speculator: the engine's proposers by name, the budget of each, and what happens when one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from infer.request import Phase, Request, Upkeep
from infer.speculation.budget import NOTHING, Budget
from infer.speculation.control.planner import Candidate, Planner
from infer.speculation.proposers.base import NoProposer, Proposer
from infer.speculation.proposers.combined import CombinedProposer
from infer.speculation.tree import DraftTree

log = logging.getLogger(__name__)

JOINED = 0.75  # share of a load that must be decoding, or more requests are about to join than a plan would outlast
LASTS = 4  # tracking starts only if a request has at least this many times its drafter's warm-up in tokens left
PATIENCE = 16  # after every so many steps in a row without a draft, a drafter may release the request


def keepers(proposer: Proposer) -> Sequence[Proposer]:
    """Return the proposers that keep state of requests.

    A combined proposer leaves that to its sources, which may also be registered under their names.
    """
    return proposer.sources if isinstance(proposer, CombinedProposer) else (proposer,)


def grouped(names: Sequence[str]) -> list[list[int]]:
    """Return the indices of each name."""
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    return list(groups.values())


class Drafting:
    """Proposers by name, each with its largest budget per step. Requests cannot select other names."""

    def __init__(
        self,
        proposers: Mapping[str, tuple[Proposer, Budget]],
        default: str,
        context: int,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        everyone = {"none": (NoProposer(), NOTHING), **proposers}
        self._proposers: dict[str, Proposer] = {name: proposer for name, (proposer, _) in everyone.items()}
        self._limits = {name: limit for name, (_, limit) in everyone.items()}
        self._keepers = dict.fromkeys(own for proposer in self._proposers.values() for own in keepers(proposer))
        self._context, self.default, self._timer = context, default, timer
        self._followed: dict[str, set[str]] = {}  # by drafter, the requests that it keeps state of
        self._idle: dict[str, int] = {}  # for each of these, steps since its last draft
        self.seconds = 0.0  # spent in proposing, in all
        self.failures = 0  # requests whose proposer failed
        if default not in self._proposers:
            raise ValueError(f"proposer={default}: this engine has {', '.join(self.names)}")

    @property
    def names(self) -> list[str]:
        return sorted(self._proposers)

    def name_for(self, request: Request) -> str:
        return "none" if request.upkeep is Upkeep.NONE else self._drafter(request)

    def _drafter(self, request: Request) -> str:
        """Return the name of the proposer that drafts for the request whenever that pays."""
        if not request.params.speculate or request.drafting_failed:
            return "none"
        return request.params.proposer or self.default

    def wants_features(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Return which hidden states of the target these requests' proposers read; () if none reads any."""
        if not any(self._followed.values()):
            return ()
        return next((aux for request in requests if (aux := self._of(request).aux_layers)), ())

    def reads(self, request: Request) -> bool:
        """Return whether the request's proposer takes its features."""
        return request.upkeep is not Upkeep.NONE and bool(self._of(request).aux_layers)

    def meet(self, request: Request, planner: Planner, load: int) -> None:
        """Decide, before admission, whether the drafter tracks the request from the start. `load` counts it too.

        While nothing is drafted, the cost of speculation is this tracking: features are kept, prompts are read. So
        where drafting would not pay no request is tracked; `grant` starts tracking one that is drafted for after all.
        """
        name = self._drafter(request)
        if not self._follows(name):
            return
        followed = self._followed.setdefault(name, set())
        pays = planner.outlook(name, self._limits[name], load, request.kinds_ahead, len(request.tokens))
        request.upkeep = Upkeep.WHOLE if pays else Upkeep.NONE
        (followed.add if pays else followed.discard)(request.request_id)
        parent = request.parent
        if pays and parent is not None and parent.phase is Phase.DECODE and not self._caught_up(parent):
            request.parent = None  # the drafter's KV in its pages is incomplete

    def _caught_up(self, request: Request) -> bool:
        """Make its drafter read all committed positions; return False if it has not tracked it from the start."""
        if request.upkeep is Upkeep.WHOLE:
            try:
                self._of(request).catch_up(request)
            except Exception as error:
                self._give_up(request, error)
        return request.upkeep is Upkeep.WHOLE

    def grant(self, request: Request, planner: Planner, load: int) -> Budget:
        """Return the request's budget in this step.

        Also makes a drafter start tracking a request that it had released, or release one.
        """
        known, passed_over = request.request_id, planner.passes_over(request.request_id)
        if passed_over and request.upkeep is Upkeep.NONE:  # the most frequent case where drafting does not pay
            return NOTHING
        granted, name = NOTHING if passed_over else planner.budget(known, self.budget(request)), self._drafter(request)
        if not self._follows(name):
            return granted
        if granted.nodes:
            self._idle[known] = 0
            if request.upkeep is Upkeep.NONE:
                request.upkeep = Upkeep.REST
                self._followed.setdefault(name, set()).add(known)
                try:
                    self._proposers[name].wake(request)
                except Exception as error:
                    self._give_up(request, error)
            return granted if self._is_ready(request) else NOTHING
        if request.upkeep is not Upkeep.NONE:
            self._idle[known] = self._idle.get(known, 0) + 1
            tired = self._idle[known] % PATIENCE == 0
            if tired and not planner.outlook(name, self._limits[name], load, request.kinds_ahead):
                self.release(request)
                request.upkeep = Upkeep.NONE
        return NOTHING

    def _is_ready(self, request: Request) -> bool:
        return request.upkeep is not Upkeep.NONE and self._of(request).ready(request)

    def _follows(self, name: str) -> bool:
        proposer = self._proposers[name]
        return bool(proposer.aux_layers or proposer.kv_layers)

    def budget(self, request: Request) -> Budget:
        """Return the request's largest budget: no deeper than the tokens it may still emit before the bonus token."""
        name = self._drafter(request)
        if name == "none":
            return NOTHING
        room = min(request.remaining, self._context - len(request.tokens)) - 1
        asked = request.params.max_draft_tokens
        return self._within(name, room if asked is None else min(room, asked))

    def _within(self, name: str, depth: int | None) -> Budget:
        """Return the largest budget of this proposer that is no deeper than `depth`."""
        limit = self._limits[name]
        depth = limit.depth if depth is None else max(0, min(limit.depth, depth))
        return NOTHING if depth == 0 else Budget(depth if limit.is_chain else limit.nodes, depth)

    def settled(self, request: Request, planner: Planner) -> tuple[str, Budget] | None:
        """Return which proposer drafts for the request, and its budget for as long as the request does not end.

        None if its drafter must first start tracking it.
        """
        name, drafter = self.name_for(request), self._drafter(request)
        if name != drafter and not planner.passes_over(request.request_id):
            return None
        if name == "none" or not self._of(request).ready(request):
            return name, NOTHING
        budget = planner.budget(request.request_id, self._within(name, request.params.max_draft_tokens))
        return ("none", NOTHING) if budget == NOTHING and not self._follows(name) else (name, budget)

    def places(self, request: Request, budget: Budget) -> int:
        return self._of(request).places(budget) if budget.nodes else 0

    def candidates(self, decoding: Sequence[Request], planner: Planner, load: int) -> list[Candidate]:
        """Return those of these requests that may be drafted for. `load` counts them and those about to join them.

        Empty while so many are about to join that drafting will not pay with them: during a burst of prompts only few
        requests decode, and only for a moment.
        """
        name = self.default
        if load * JOINED > len(decoding) and not any(
            planner.outlook(name, self._limits[name], load, own.kinds_ahead) for own in decoding
        ):
            return []
        allowed = ((request, self.budget(request)) for request in decoding)
        return [self._candidate(own, budget, planner, load) for own, budget in allowed if budget.nodes]

    def _candidate(self, request: Request, allowed: Budget, planner: Planner, load: int) -> Candidate:
        name, ready = self._drafter(request), self._is_ready(request)
        wakes = not ready and request.remaining >= LASTS * self._proposers[name].warm_up
        wakes = wakes and planner.outlook(name, self._limits[name], load, request.kinds_ahead)
        return Candidate(request.request_id, name, allowed, ready, request.kind, wakes, len(request.tokens))

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
        names = [self.name_for(own) if budget.nodes else "none" for own, budget in zip(requests, budgets, strict=True)]
        for own in grouped(names):
            trees.append(self._propose([requests[i] for i in own], [budgets[i] for i in own]))
            rows.append(own)
        return trees[0] if len(trees) == 1 else DraftTree.stack(trees, rows)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        """Commit the `counts[b]` new positions of each request.

        `features` `[n, F]`: those of the requests whose proposers take them, one request after another.
        """
        reading = [count if self.reads(request) else 0 for request, count in zip(requests, counts, strict=True)]
        groups = grouped([self.name_for(request) for request in requests])
        pieces = features.split(reading) if len(groups) > 1 and any(reading) else ()
        for own in groups:
            batch, drafter = [requests[i] for i in own], self._of(requests[own[0]])
            whole = sum(reading) == sum(reading[i] for i in own)
            rows = features if whole or not drafter.aux_layers else torch.cat([pieces[i] for i in own])
            try:
                drafter.commit(batch, [counts[i] for i in own], rows)
            except Exception as error:  # its state of any of them can no longer be trusted
                for request in batch:
                    self._give_up(request, error)

    def read_again(self, requests: Sequence[Request], features: Tensor) -> None:
        """Make drafters read all committed positions of each request like a prompt, with these `features` `[n, F]`."""
        for request in requests:
            self._of(request).release(request)
            request.phase = Phase.PREFILL
        self.commit(requests, [request.computed for request in requests], features)
        for request in requests:
            request.phase = Phase.DECODE

    def filled_by(self, request: Request) -> str:
        """Return a name for the KV layers that the request fills.

        Requests with the same name fill the same layers of their pages, and may share them.
        """
        return self.name_for(request) if self._of(request).kv_layers else ""

    def synced(self, request: Request) -> int:
        """Return how many of its committed positions are filled in all layers that its pages are keyed by."""
        return self._of(request).synced(request) if request.upkeep is Upkeep.WHOLE else request.computed

    def resume(self, request: Request) -> None:
        try:
            self._of(request).resume(request)
        except Exception as error:
            self._give_up(request, error)

    def release(self, request: Request) -> None:
        for proposer in self._keepers:
            try:
                proposer.release(request)
            except Exception:  # the request still ends, and the others continue
                log.exception("%s: proposer %s could not let go of it", request.request_id, proposer.name)
        for followed in self._followed.values():
            followed.discard(request.request_id)
        self._idle.pop(request.request_id, None)

    def _of(self, request: Request) -> Proposer:
        return self._proposers[self.name_for(request)]

    def _propose(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """Return the trees of one proposer's requests. A failure costs only the request that caused it its drafts."""
        proposer = self._of(requests[0]) if budgets[0].nodes else NoProposer()
        try:
            return proposer.propose(requests, budgets)
        except Exception as error:
            if len(requests) == 1:
                self._give_up(requests[0], error)
                return NoProposer().propose(requests, budgets)
        pairs = zip(requests, budgets, strict=True)
        alone = [self._propose([request], [budget]) for request, budget in pairs]
        return DraftTree.stack(alone, [[index] for index in range(len(alone))])

    def _give_up(self, request: Request, error: Exception) -> None:
        name = self.name_for(request)
        log.warning("%s: proposer %s failed and drafts no more for it: %r", request.request_id, name, error)
        self.release(request)
        self.failures += 1
        request.drafting_failed, request.upkeep = True, Upkeep.NONE
