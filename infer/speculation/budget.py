"""The draft budget of a request in one step, and the outcome of its draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PARTS = 8  # a tree may be drafted in eighths of its nodes


class Budget(NamedTuple):
    """The largest draft of one request in one step, without the root; a chain if its depth is its number of nodes."""

    nodes: int
    depth: int  # no node deeper than this could be emitted

    @property
    def is_chain(self) -> bool:
        return self.nodes == self.depth

    def within(self, nodes: int) -> Budget:
        return self if nodes >= self.nodes else Budget(nodes, min(self.depth, nodes))


NOTHING = Budget(0, 0)


def candidate_budgets(limit: Budget) -> list[Budget]:
    """Return the candidate budgets within `limit`, ascending: a chain of any depth, a tree's best nodes."""
    nodes, depth = limit
    if limit.is_chain:
        return [Budget(level, level) for level in range(1, depth + 1)]
    sizes = sorted({-(-nodes * part // PARTS) for part in range(1, PARTS + 1)})
    return [Budget(size, depth) for size in sizes if size != depth]


class VerifiedDraft(NamedTuple):
    """The outcome of a request's draft."""

    budget: Budget  # that it was drafted under
    nodes: int  # number of drafted nodes
    depth: int  # of the deepest of them
    path: Sequence[int]  # which of them were accepted, counted from 1
