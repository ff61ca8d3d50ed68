"""Builds a static draft tree from measured accuracies, as Medusa does (arXiv 2401.10774, section 2.3.3).

`accuracy[d][r]` is how often the token that the target chose at depth d had rank r in the head's draft at that depth.
If misses at different depths were independent, the acceptance rate of a node would be the product of the accuracies
along its path; the tree of the nodes with the highest products then has the greatest expected acceptance length of its
size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infer.config import ProposerConfig
from infer.options.draft_tree import Measured
from models.config import read_json
from models.heads.config import PROVENANCE

RANK_ACCURACY = "rank_accuracy"  # key of `accuracy` in an exported head's provenance file


def resolve_tree(config: ProposerConfig, folder: Path) -> ProposerConfig:
    """Replace `proposer.tree=measured` by the tree of the exported head in `folder`; return any other config unchanged.

    The tree is no deeper than `proposer.max_draft_tokens`. Raises ValueError for a head that was not measured.
    """
    tree = config.shape
    if not isinstance(tree, Measured):
        return config
    accuracy = rank_accuracy(folder)
    if accuracy is None:
        raise ValueError(
            f"proposer.tree={config.tree}: {folder / PROVENANCE} holds no {RANK_ACCURACY}, which training writes; "
            "give the paths themselves, proposer.tree=[[0],[1],[0,0]], or a beam, proposer.tree=beam:4x5"
        )
    paths, _ = best_paths(accuracy[: config.max_draft_tokens], tree.nodes)
    if not paths:
        raise ValueError(f"proposer.tree={config.tree}: the head in {folder} was never right")
    return replace(config, tree=[list(path) for path in paths])


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
