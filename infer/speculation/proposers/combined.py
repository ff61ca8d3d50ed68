"""Merges the drafts of several proposers into one tree of the nodes that are likeliest to be accepted.

Sources that copy from texts draft first, since that is free. One that runs a model drafts only as deep as its drafts
have been accepted, and not at all where what the others drafted is as good as certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from infer.request import Request
from infer.speculation.budget import NOTHING, Budget, VerifiedDraft
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.proposers.base import Needs, Proposer, Tracker
from infer.speculation.proposers.merging import Drafted, accepted, merge
from infer.speculation.proposers.tenants import PerTenant
from infer.speculation.tree import DraftTree

LEAST = 0.1  # probability to be accepted below which a node is not worth its row in a verify
LEVEL = 0.2  # that below which a level is not worth a forward of a model that drafts


class CombinedProposer(Proposer):
    """Merges the drafts of `sources`, proposers by name with their largest budgets."""

    name = "combined"

    def __init__(self, sources: Mapping[str, tuple[Proposer, Budget]]) -> None:
        self.sources = tuple(proposer for proposer, _ in sources.values())
        self._limits = {proposer: limit for proposer, limit in sources.values()}
        self._acceptance = PerTenant(AcceptanceModel)
        self._drafts: dict[str, list[tuple[Proposer, Budget, int, Drafted]]] = {}  # by request, the last to be measured
        needs = [source.needs for source in self.sources]
        self.needs = Needs(
            next((need.aux_layers for need in needs if need.aux_layers), ()),
            tuple(layer for need in needs for layer in need.kv_layers),
            max(need.warm_up for need in needs),
        )
        trackers = [source.tracker for source in self.sources if source.tracker is not None]
        self._tracker = Trackers(trackers) if trackers else None

    @property
    def tracker(self) -> Tracker | None:
        return self._tracker

    def places(self, budget: Budget) -> int:
        return max(budget.nodes, *(source.places(self._within(source, budget)) for source in self.sources))

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        for request in requests:
            self._record(request)
        drafts: list[list[Drafted]] = [[] for _ in requests]
        for source in sorted(self.sources, key=lambda source: source.tracker is not None):
            limits = [self._worthwhile(source, *each) for each in zip(requests, budgets, drafts, strict=True)]
            drafting = [index for index, limit in enumerate(limits) if limit.nodes]
            if not drafting:
                continue
            tree = source.propose([requests[index] for index in drafting], [limits[index] for index in drafting])
            for row, index in enumerate(drafting):
                request, limit = requests[index], limits[index]
                estimates = source.chances(request)
                measured = self._measured(source, request, limit) if estimates is None else estimates
                draft = Drafted.of(tree, row, measured)
                drafts[index].append(draft)
                if estimates is None:
                    unmeasured = self._drafts.setdefault(request.request_id, [])
                    unmeasured.append((source, limit, len(request.tokens), draft))
        merged = [
            merge(row, budget.nodes, LEAST) if row else ([request.tokens[-1]], [-1])
            for row, request, budget in zip(drafts, requests, budgets, strict=True)
        ]
        return assembled(merged)

    def _within(self, source: Proposer, budget: Budget) -> Budget:
        """Return the part of a budget that the source may draft."""
        limit = self._limits[source]
        depth = min(limit.depth, budget.depth)
        return Budget(depth, depth) if limit.is_chain else Budget(min(limit.nodes, budget.nodes), depth)

    def _worthwhile(self, source: Proposer, request: Request, budget: Budget, drafts: Sequence[Drafted]) -> Budget:
        """Return the source's budget beside what others have drafted."""
        allowed = self._within(source, budget)
        if source.tracker is None:
            return allowed
        sure = [draft.chances for draft in drafts if len(draft.chances) > budget.nodes]
        if any(chances[budget.nodes] >= 1 - chances[1] for chances in sure):
            return NOTHING  # none of its nodes could be among the likeliest
        if not allowed.is_chain:
            return allowed
        depth = sum(chance >= LEVEL for chance in self._measured(source, request, allowed))
        return Budget(max(1, depth), max(1, depth))

    def _measured(self, source: Proposer, request: Request, budget: Budget) -> Sequence[float]:
        """Return how often each node of the source's drafts was right."""
        return self._acceptance.of(request).chances(
            request.request_id, source.name, budget, request.params.temperature > 0
        )

    def _record(self, request: Request) -> None:
        """Record which tokens of the request's last drafts were right, whether they were verified or not."""
        for source, budget, start, draft in self._drafts.pop(request.request_id, ()):
            emitted, nodes = request.tokens[start:], len(draft.tokens) - 1
            if not (emitted and nodes):
                continue
            deepest = min(nodes if budget.is_chain else budget.depth, len(emitted))
            outcome = VerifiedDraft(budget, nodes, deepest, accepted(draft, emitted))
            self._acceptance.of(request).record(
                request.request_id, source.name, outcome, 0.0, request.params.temperature > 0
            )

    def release(self, request: Request) -> None:
        self._drafts.pop(request.request_id, None)
        self._acceptance.of(request).forget(request.request_id)
        for source in self.sources:
            source.release(request)


class Trackers(Tracker):
    """Several proposers' trackers, at least one, as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def resume(self, request: Request) -> None:
        for tracker in self._trackers:
            tracker.resume(request)

    def start_tracking(self, request: Request) -> None:
        for tracker in self._trackers:
            tracker.start_tracking(request)

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        for tracker in self._trackers:
            tracker.commit(requests, counts, features)

    def catch_up(self, request: Request) -> None:
        for tracker in self._trackers:
            tracker.catch_up(request)

    def synced(self, request: Request) -> int:
        return min(tracker.synced(request) for tracker in self._trackers)

    def ready(self, request: Request) -> bool:
        return all(tracker.ready(request) for tracker in self._trackers)


def assembled(merged: Sequence[tuple[list[int], list[int]]]) -> DraftTree:
    lengths = [len(tokens) for tokens, _ in merged]
    width = max(lengths)
    return DraftTree.assemble(
        token=torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in merged]),
        parent=torch.tensor([parents + [0] * (width - len(parents)) for _, parents in merged]),
        length=torch.tensor(lengths),
    )
