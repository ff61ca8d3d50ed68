"""A fixed tree out of measured accuracies: Medusa's way to choose one (arXiv 2401.10774, section 2.3.3).

`accuracy[d][r]` is how often the token that the target chose at depth d stood at rank r of the head's draft there. If
depths missed independently of each other, a node would be accepted as often as the product along its path says; the
tree of the best nodes then has the greatest expected acceptance length of its size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infer.config import MEASURED_TREE, ProposerConfig
from models.config import read_json
from models.heads import PROVENANCE

RANK_ACCURACY = "rank_accuracy"  # in the provenance of an exported head: `accuracy`
NODES = 16  # where proposer.tree_nodes does not say


def resolve_tree(config: ProposerConfig, folder: Path) -> ProposerConfig:
    """`proposer.tree=measured` as the tree of the exported head in `folder`; another config as it is.

    No deeper than `proposer.max_draft_tokens`. Raises ValueError for a head that was not measured.
    """
    if config.tree != MEASURED_TREE:
        return config
    accuracy = rank_accuracy(folder)
    if accuracy is None:
        raise ValueError(
            f"proposer.tree={MEASURED_TREE}: {folder / PROVENANCE} holds no {RANK_ACCURACY}, which training writes; "
            "give the paths themselves, proposer.tree=[[0],[1],[0,0]], or a beam, proposer.tree_width=4"
        )
    paths, _ = best_paths(accuracy[: config.max_draft_tokens], config.tree_nodes or NODES)
    if not paths:
        raise ValueError(f"proposer.tree={MEASURED_TREE}: the head in {folder} was never right")
    return replace(config, tree=[list(path) for path in paths], tree_nodes=None)


def rank_accuracy(folder: Path) -> list[list[float]] | None:
    """What training measured of the exported head in `folder`, if it did."""
    path = folder / PROVENANCE
    return read_json(path).get(RANK_ACCURACY) if path.is_file() else None


def best_paths(accuracy: Sequence[Sequence[float]], nodes: int) -> tuple[list[tuple[int, ...]], float]:
    """The `nodes` most valuable nodes as paths of ranks, best first, and 1 + the sum of their values: the expected τ.

    Fewer where nothing else was ever right. Ties go to the shorter path, then to the lower ranks.
    """
    found: list[tuple[int, ...]] = []
    total = 1.0
    frontier: list[tuple[float, int, tuple[int, ...]]] = []

    def grow(path: tuple[int, ...], value: float) -> None:
        if len(path) < len(accuracy):
            for rank, share in enumerate(accuracy[len(path)]):
                if share > 0:
                    heapq.heappush(frontier, (-value * share, len(path) + 1, (*path, rank)))

    grow((), 1.0)
    while frontier and len(found) < nodes:
        value, _, path = heapq.heappop(frontier)
        found.append(path)
        total -= value
        grow(path, -value)
    return found, total
