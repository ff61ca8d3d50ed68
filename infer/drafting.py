"""Who drafts for a request: the engine's proposers by name, how far each may go, and what happens when one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from infer.controller import Candidate
from infer.proposers.base import NOTHING, Budget, NoProposer, Proposer
from infer.proposers.combined import CombinedProposer
from infer.request import Phase, Request
from infer.tree import DraftTree

log = logging.getLogger(__name__)


def keepers(proposer: Proposer) -> Sequence[Proposer]:
    """Who keeps state of requests: a combination leaves it to its sources, which may have names of their own too."""
    return proposer.sources if isinstance(proposer, CombinedProposer) else (proposer,)


class Drafting:
    """Proposers by name, each with what it is given at most per step. Other names cannot be asked for."""

    def __init__(self, proposers: Mapping[str, tuple[Proposer, Budget]], default: str, context: int) -> None:
        everyone = {"none": (NoProposer(), NOTHING), **proposers}
        self._proposers: dict[str, Proposer] = {name: proposer for name, (proposer, _) in everyone.items()}
        self._limits = {name: limit for name, (_, limit) in everyone.items()}
        self._keepers = dict.fromkeys(own for proposer in self._proposers.values() for own in keepers(proposer))
        self._context, self.default = context, default
        self.seconds = 0.0  # spent in proposing, in all
        self.failures = 0  # requests for which a proposer gave up
        if default not in self._proposers:
            raise ValueError(f"proposer={default}: this engine has {', '.join(self.names)}")

    @property
    def names(self) -> list[str]:
        return sorted(self._proposers)

    def name_for(self, request: Request) -> str:
        if not request.params.speculate or request.drafting_failed:
            return "none"
        return request.params.proposer or self.default

    def wants_features(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """The target's hidden states that any of these requests' proposers reads."""
        return next((aux for request in requests if (aux := self._of(request).aux_layers)), ())

    def budget(self, request: Request) -> Budget:
        """No deeper than tokens may still be emitted, the bonus token set aside."""
        name = self.name_for(request)
        if name == "none":
            return NOTHING
        limit = self._limits[name]
        room = min(request.remaining, self._context - len(request.tokens)) - 1
        asked = request.params.max_draft_tokens
        depth = max(0, min(limit.depth, room, limit.depth if asked is None else asked))
        chain = limit.nodes == limit.depth
        return NOTHING if depth == 0 else Budget(depth if chain else limit.nodes, depth)

    def places(self, request: Request, budget: Budget) -> int:
        return self._of(request).places(budget) if budget.nodes else 0

    def candidates(self, running: Sequence[Request]) -> tuple[int, list[Candidate]]:
        """How many of these requests decode, and those of them that may be drafted for."""
        decoding = [request for request in running if request.phase is Phase.DECODE]
        allowed = ((request, self.budget(request)) for request in decoding)
        found = [Candidate(own.request_id, self.name_for(own), budget) for own, budget in allowed if budget.nodes]
        return len(decoding), found

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        """One tree per request, whoever drafts it."""
        begin = time.perf_counter()
        try:
            return self._propose_all(requests, budgets)
        finally:
            self.seconds += time.perf_counter() - begin

    def _propose_all(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        trees: list[DraftTree] = []
        rows: list[list[int]] = []
        for own in self._groups(requests):
            trees.append(self._propose([requests[i] for i in own], [budgets[i] for i in own]))
            rows.append(own)
        return trees[0] if len(trees) == 1 else DraftTree.stack(trees, rows)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        """`features` `[sum(counts), ...]` of the rows, empty in the last dimension if no request wanted any."""
        pieces = features.split(list(counts))
        for own in self._groups(requests):
            batch, rows = [requests[i] for i in own], torch.cat([pieces[i] for i in own])
            try:
                self._of(batch[0]).commit(batch, [counts[i] for i in own], rows)
            except Exception as error:  # what it kept of any of them can no longer be trusted
                for request in batch:
                    self._give_up(request, error)

    def filled_by(self, request: Request) -> str:
        """Requests with one answer fill the same layers of their pages, and may share them."""
        return self.name_for(request) if self._of(request).kv_layers else ""

    def synced(self, request: Request) -> int:
        return self._of(request).synced(request)

    def resume(self, request: Request) -> None:
        self._of(request).resume(request)

    def release(self, request: Request) -> None:
        for proposer in self._keepers:
            proposer.release(request)

    def _of(self, request: Request) -> Proposer:
        return self._proposers[self.name_for(request)]

    def _groups(self, requests: Sequence[Request]) -> list[list[int]]:
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self.name_for(request), []).append(index)
        return list(groups.values())

    def _propose(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        """A failure costs the drafts of the request that caused it, and no other's."""
        proposer = self._of(requests[0])
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
        self._proposers[name].release(request)
        self.failures += 1
        request.drafting_failed = True
        request.keys = None  # its pages are no longer filled in every layer
