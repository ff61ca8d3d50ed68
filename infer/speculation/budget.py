"""How far a request may be drafted for in a step, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PARTS = 8  # a tree may be drafted by eighths of its nodes


class Budget(NamedTuple):
    """How far one request may be drafted for in one step, the root not counted: a chain if as deep as it has nodes."""

    nodes: int
    depth: int  # no node deeper than this could be emitted

    @property
    def is_chain(self) -> bool:
        return self.nodes == self.depth

    def within(self, nodes: int) -> Budget:
        return self if nodes >= self.nodes else Budget(nodes, min(self.depth, nodes))


NOTHING = Budget(0, 0)


def cuts(limit: Budget) -> list[Budget]:
    """What of it may be drafted, ascending: a chain down to any depth, some of the best nodes of a tree."""
    nodes, depth = limit
    if limit.is_chain:
        return [Budget(level, level) for level in range(1, depth + 1)]
    sizes = sorted({-(-nodes * part // PARTS) for part in range(1, PARTS + 1)})
    return [Budget(size, depth) for size in sizes if size != depth]


class Verified(NamedTuple):
    """What became of a request's draft."""

    asked: Budget  # that it was drafted under
    nodes: int  # drafted
    depth: int  # of the deepest of them
    path: Sequence[int]  # which of them were accepted, counted from 1
