"""Reads what training measured of an exported head, and finds the best static draft tree by it.

Medusa builds its trees so (arXiv 2401.10774, section 2.3.3). `accuracy[d][r]` is how often the token that the target
chose at depth d had rank r in the head's draft at that depth. If misses at different depths were independent, the
acceptance rate of a node would be the product of the accuracies along its path; the tree of the nodes with the highest
products then has the greatest expected acceptance length of its size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

from models.config import read_json
from models.heads.config import PROVENANCE

RANK_ACCURACY = "rank_accuracy"  # key of `accuracy` in an exported head's provenance file


def rank_accuracy(folder: Path) -> list[list[float]] | None:
    """Return the accuracies that training measured for the exported head in `folder`; None if there are none."""
    path = folder / PROVENANCE
    return read_json(path).get(RANK_ACCURACY) if path.is_file() else None


def best_paths(accuracy: Sequence[Sequence[float]], nodes: int) -> tuple[list[tuple[int, ...]], float]:
    """Return the `nodes` nodes of the highest acceptance rates as paths of ranks, best first, and the expected τ.

    τ is 1 + the sum of their rates. Fewer nodes are returned if all others have the rate 0. Ties go to the shorter
    path, then to the lower ranks.
    """
    paths: list[tuple[int, ...]] = []
    total = 1.0
    frontier: list[tuple[float, int, tuple[int, ...]]] = []

    def grow(path: tuple[int, ...], value: float) -> None:
        if len(path) < len(accuracy):
            for rank, share in enumerate(accuracy[len(path)]):
                if share > 0:
                    heapq.heappush(frontier, (-value * share, len(path) + 1, (*path, rank)))

    grow((), 1.0)
    while frontier and len(paths) < nodes:
        value, _, path = heapq.heappop(frontier)
        paths.append(path)
        total -= value
        grow(path, -value)
    return paths, total
