"""Merges the drafts of several proposers into one tree of the nodes that are likeliest to be accepted."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from infer.batch.tree import MAX_NODES, DraftTree


class Drafted(NamedTuple):
    """One source's draft for one request; node 0 is the root."""

    tokens: Sequence[int]
    parents: Sequence[int]
    chances: Sequence[float]  # of each node to be accepted; the root's is 1

    @classmethod
    def of(cls, tree: DraftTree, row: int, chances: Sequence[float]) -> Drafted:
        """Return a row of a tree. `chances`: of its drafted nodes, in their order; the last one's holds for others."""
        count = int(tree.length[row])
        tokens, parents = tree.token[row, :count].tolist(), tree.parent[row, :count].tolist()
        estimates = [*chances[: count - 1]]
        return cls(tokens, parents, [1.0, *estimates, *estimates[-1:] * (count - 1 - len(estimates))])


@dataclass
class Node:
    """A run of drafted tokens, and the probability that its last token is right if the others are.

    Of several sources' estimates the highest holds: they draw on the same texts, so that agreement says little.
    """

    children: dict[int, Node] = field(default_factory=dict)
    chance: float = 0.0


def merge(drafts: Sequence[Drafted], limit: int, least: float) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a tree of at most `limit` drafted nodes of these drafts, which share their root.

    The nodes are in the order of their probability, none below `least`. Of siblings only one can be right: the
    probability of each is that of all likelier ones being wrong, times its own.
    """
    root = overlaid(drafts)
    tokens, parents = [drafts[0].tokens[0]], [-1]
    waiting: list[tuple[float, int, int, int, Node]] = []  # minus the probability, tie, parent, token, node

    def push(node: Node, place: int, chance: float) -> None:
        left = 1.0
        for token, child in sorted(node.children.items(), key=lambda item: -item[1].chance):
            share = left * child.chance
            left -= share
            if chance * share >= least:
                heapq.heappush(waiting, (-chance * share, len(waiting), place, token, child))

    push(root, 0, 1.0)
    while waiting and len(tokens) <= min(limit, MAX_NODES - 1):
        chance, _, parent, token, node = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        push(node, len(tokens) - 1, -chance)
    return tokens, parents


def overlaid(drafts: Sequence[Drafted]) -> Node:
    root = Node()
    for draft in drafts:
        nodes = [root]
        for token, parent, chance in zip(draft.tokens[1:], draft.parents[1:], draft.chances[1:], strict=True):
            node = nodes[parent].children.setdefault(token, Node())
            above = draft.chances[parent]
            node.chance = max(node.chance, min(1.0, chance / above) if above else 0.0)
            nodes.append(node)
    return root


def accepted(draft: Drafted, emitted: Sequence[int]) -> list[int]:
    """Return the nodes of a draft on the path of the tokens that were emitted after its root, from depth 1 on."""
    edges = zip(draft.parents, draft.tokens, strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    path, node = list[int](), 0
    for token in emitted:
        child = children.get((node, token))
        if child is None:
            break
        path.append(node := child)
    return path
