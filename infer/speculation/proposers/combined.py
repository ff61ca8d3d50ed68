"""Merges the drafts of several proposers into one tree of the nodes that are likeliest to be accepted.

Sources that copy from texts draft first, since that is free. One that runs a model drafts only as deep as its drafts
have been accepted, and not at all where what the others drafted is as good as certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infer.batch.history import History
from infer.batch.tree import NOTHING, Budget, DraftTree, VerifiedDraft
from infer.request import Needs, Proposer, ProposerState, Request
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.proposers.merging import Drafted, accepted, merge
from infer.speculation.proposers.tenants import PerTenant

LEAST = 0.1  # probability to be accepted below which a node is not worth its row in a verify
LEVEL = 0.2  # that below which a level is not worth a forward of a model that drafts
# The name of the rates of copies that contradict better ones: they are right far less often than copies usually are.
CONTRADICTING = "contradicting"


@dataclass
class CombinedState(ProposerState):
    """What the sources keep of one request, and its last drafts of those that cannot tell how likely they are."""

    of: dict[Proposer, Any]
    history: History = field(default_factory=History)  # of the drafts that are measured
    # to be measured: the name of their rates, their budget, tokens before them
    drafts: list[tuple[str, Budget, int, Drafted]] = field(default_factory=list)

    def ready(self, request: Request) -> bool:
        return all(state.ready(request) for state in self.of.values())

    def synced(self, request: Request) -> int:
        return min(state.synced(request) for state in self.of.values())

    def end(self, request: Request) -> None:
        for state in self.of.values():
            state.end(request)


class CombinedProposer(Proposer):
    """Merges the drafts of `sources`, proposers by name with their largest budgets."""

    name = "combined"

    def __init__(self, sources: Mapping[str, tuple[Proposer, Budget]]) -> None:
        self.sources = tuple(proposer for proposer, _ in sources.values())
        self._ordered = sorted(self.sources, key=lambda source: (source.needs.tracking, not source.self_limiting))
        self._limits = {proposer: limit for proposer, limit in sources.values()}
        self._acceptance = PerTenant(AcceptanceModel)
        needs = [source.needs for source in self.sources]
        self.needs = Needs(
            next((need.aux_layers for need in needs if need.aux_layers), ()),
            tuple(layer for need in needs for layer in need.kv_layers),
            max(need.warm_up for need in needs),
        )

    def begin(self, request: Request) -> CombinedState:
        return CombinedState({source: source.begin(request) for source in self.sources})

    def places(self, budget: Budget) -> int:
        return max(budget.nodes, *(source.places(self._within(source, budget)) for source in self.sources))

    def propose(
        self, requests: Sequence[Request], states: Sequence[CombinedState], budgets: Sequence[Budget]
    ) -> DraftTree:
        for request, state in zip(requests, states, strict=True):
            self._record(request, state)
        drafts: list[list[Drafted]] = [[] for _ in requests]
        trees: list[DraftTree] = []  # those of which nodes are merged
        for source in self._ordered:
            parts = zip(requests, states, budgets, drafts, strict=True)
            limits = [self._worthwhile(source, *each) for each in parts]
            drafting = [index for index, limit in enumerate(limits) if limit.nodes]
            if not drafting:
                continue
            kept = [states[index].of[source] for index in drafting]
            tree = source.propose([requests[index] for index in drafting], kept, [limits[index] for index in drafting])
            lengths, before = tree.length.tolist(), sum(map(len, drafts))
            for row, index in enumerate(drafting):
                if lengths[row] < 2 or repeats(source, tree, row, drafts[index]):
                    continue
                request, state, limit = requests[index], states[index], limits[index]
                if source.self_limiting:  # it estimates the probability of each node; others' are measured here
                    draft = Drafted.of(tree, row, state.of[source].chances)
                else:
                    name = source.name if source.needs.tracking or not drafts[index] else CONTRADICTING
                    draft = Drafted.of(tree, row, self._measured(name, request, state, limit))
                    state.drafts.append((name, limit, len(request.tokens), draft))
                drafts[index].append(draft)
            if sum(map(len, drafts)) > before:
                trees.append(tree)
        if len(trees) == 1 and len(trees[0].length) == len(requests) and trees[0].is_chain:
            return trees[0]
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

    def _worthwhile(
        self, source: Proposer, request: Request, state: CombinedState, budget: Budget, drafts: Sequence[Drafted]
    ) -> Budget:
        """Return the source's budget beside what others have drafted."""
        allowed = self._within(source, budget)
        if not source.needs.tracking:
            if not drafts or source.self_limiting:
                return allowed
            right = self._measured(CONTRADICTING, request, state, allowed)[0]
            return allowed if right * (1 - max(draft.chances[1] for draft in drafts)) >= LEAST else NOTHING
        sure = [draft.chances for draft in drafts if len(draft.chances) > budget.nodes]
        if any(chances[budget.nodes] >= 1 - chances[1] for chances in sure):
            return NOTHING  # none of its nodes could be among the likeliest
        if not allowed.is_chain:
            return allowed
        depth = sum(chance >= LEVEL for chance in self._measured(source.name, request, state, allowed))
        return Budget(max(1, depth), max(1, depth))

    def _measured(self, name: str, request: Request, state: CombinedState, budget: Budget) -> Sequence[float]:
        """Return how often each node of drafts with these rates was right."""
        return self._acceptance.of(request).chances(state.history, name, budget, request.params.temperature > 0)

    def _record(self, request: Request, state: CombinedState) -> None:
        """Record which tokens of the request's last drafts were right, whether they were verified or not."""
        last, state.drafts = state.drafts, []
        for name, budget, start, draft in last:
            emitted, nodes = request.tokens[start:], len(draft.tokens) - 1
            if not (emitted and nodes):
                continue
            deepest = min(nodes if budget.is_chain else budget.depth, len(emitted))
            outcome = VerifiedDraft(budget, nodes, deepest, accepted(draft, emitted))
            self._acceptance.of(request).record(state.history, name, outcome, 0.0, request.params.temperature > 0)

    def commit(self, requests: Sequence[Request], states: Sequence[CombinedState], features: Sequence[Tensor]) -> None:
        for source in self.sources:
            source.commit(requests, [state.of[source] for state in states], features)

    def catch_up(self, request: Request, state: CombinedState) -> None:
        for source in self.sources:
            source.catch_up(request, state.of[source])


def repeats(source: Proposer, tree: DraftTree, row: int, others: Sequence[Drafted]) -> bool:
    """Return whether a copy begins like a better one, from which it would differ only where that is likelier right."""
    return not source.needs.tracking and any(int(tree.token[row, 1]) == other.tokens[1] for other in others)


def assembled(merged: Sequence[tuple[list[int], list[int]]]) -> DraftTree:
    if all(parents == list(range(-1, len(parents) - 1)) for _, parents in merged):
        return DraftTree.chains([root for (root, *_), _ in merged], [drafted for (_, *drafted), _ in merged])
    lengths = [len(tokens) for tokens, _ in merged]
    width = max(lengths)
    return DraftTree.assemble(
        token=torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in merged]),
        parent=torch.tensor([parents + [0] * (width - len(parents)) for _, parents in merged]),
        length=torch.tensor(lengths),
    )
