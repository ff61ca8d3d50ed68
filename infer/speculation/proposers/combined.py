"""Merges the drafts of several proposers into one tree: shared tokens are verified once, others become branches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.request import Request
from infer.speculation.budget import Budget
from infer.speculation.proposers.base import Proposer
from infer.speculation.tree import MAX_NODES, DraftTree


class CombinedProposer(Proposer):
    """Merges the drafts of `sources`; of a level that the budget cuts, nodes of earlier sources come first."""

    name = "combined"

    def __init__(self, sources: Sequence[Proposer]) -> None:
        self.sources = tuple(sources)
        self.aux_layers = next((source.aux_layers for source in sources if source.aux_layers), ())
        self.kv_layers = tuple(layer for source in sources for layer in source.kv_layers)
        self.warm_up = max(source.warm_up for source in sources)

    def places(self, budget: Budget) -> int:
        return max(budget.nodes, *(source.places(budget) for source in self.sources))

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        trees = [source.propose(requests, budgets) for source in self.sources]
        return merge(trees, [budget.nodes for budget in budgets])

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        for source in self.sources:
            source.commit(requests, counts, features)

    def synced(self, request: Request) -> int:
        return min(source.synced(request) for source in self.sources)

    def resume(self, request: Request) -> None:
        for source in self.sources:
            source.resume(request)

    def release(self, request: Request) -> None:
        for source in self.sources:
            source.release(request)

    def catch_up(self, request: Request) -> None:
        for source in self.sources:
            source.catch_up(request)

    def start_tracking(self, request: Request) -> None:
        for source in self.sources:
            source.start_tracking(request)

    def ready(self, request: Request) -> bool:
        return all(source.ready(request) for source in self.sources)


def merge(trees: Sequence[DraftTree], nodes: Sequence[int]) -> DraftTree:
    """Return the union of the trees of each row, cut to `nodes[b]` drafted nodes. Trees take turns, level by level."""
    if len(trees) == 1:
        return trees[0]
    merged = [merge_row([tree_row(tree, row) for tree in trees], limit) for row, limit in enumerate(nodes)]
    lengths = [len(tokens) for tokens, _ in merged]
    width = max(lengths)
    return DraftTree.assemble(
        token=torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in merged]),
        parent=torch.tensor([parents + [0] * (width - len(parents)) for _, parents in merged]),
        length=torch.tensor(lengths),
    )


Row = tuple[list[int], list[int], list[int]]  # token, parent, depth of each node


def tree_row(tree: DraftTree, row: int) -> Row:
    length = int(tree.length[row])
    return tree.token[row, :length].tolist(), tree.parent[row, :length].tolist(), tree.depth[row, :length].tolist()


def merge_row(rows: Sequence[Row], limit: int) -> tuple[list[int], list[int]]:
    limit = min(limit, MAX_NODES - 1)
    tokens, parents = [rows[0][0][0]], [-1]
    node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node of the merged tree
    node_maps = [{0: 0} for _ in rows]  # per source: its node -> node of the merged tree
    waiting = [(depth, source, node) for source, row in enumerate(rows) for node, depth in enumerate(row[2]) if node]
    for _, source, node in sorted(waiting):
        token, parent, _ = (field[node] for field in rows[source])
        above = node_maps[source].get(parent)
        if above is None:
            continue  # its parent did not fit
        if (above, token) not in node_of:
            if len(tokens) > limit:
                continue
            node_of[above, token] = len(tokens)
            tokens.append(token)
            parents.append(above)
        node_maps[source][node] = node_of[above, token]
    return tokens, parents
