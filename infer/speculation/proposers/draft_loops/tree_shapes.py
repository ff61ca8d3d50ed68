"""Which nodes a tree-drafting head grows and which of them it proposes: pure functions of the draft's scores.

A level is grown from nodes that were run through the head (level 1 from the root): each of M nodes contributes its R
best children, the candidates. A node is identified by its candidate index, which counts over all levels in the order in
which they were grown; the root is -1.

A shape has a `depth` and, of nodes that are run through the head, `rows` over all levels and at most `width` in one.
At most `most` nodes can be proposed. `fan_out(level)` is R, the candidates at `level` (1, 2, ...) per node of the level
before that is run; 0 ends the tree. `fixed(level, device)` returns the scores `[M * R]` of a level's candidates, -inf
for one that must not be proposed, and the indices `[M']` in the level of those that the next one is grown from; None if
log-probabilities decide, best first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from infer.batch.tree import Budget, DraftTree
from infer.config import ProposerConfig
from infer.settings.draft_tree import Beam, Measured
from kernels.copies import upload, upload_lists
from kernels.operands import Candidates, Frontier, Level, Nodes, Picked
from kernels.tree import best_nodes, grow_level


@dataclass(frozen=True)
class DynamicShape:
    """EAGLE-2 (arXiv 2406.16858): a beam of `width` by cumulative log-probability.

    The best nodes of all levels are proposed. A child never scores higher than its parent, and ties go to the earlier
    candidate, so the parent of a proposed node is always proposed too.
    """

    width: int
    depth: int

    @property
    def rows(self) -> int:
        return self.width * (self.depth - 1)

    @property
    def most(self) -> int:
        return self.width + self.width * self.rows

    def fan_out(self, level: int) -> int:
        return self.width if level <= self.depth else 0

    def fixed(self, level: int, device: torch.device) -> None:
        return None


class StaticShape:
    """A tree given as data, in Medusa's notation: each node is the path of ranks that leads to it, (0, 2) being the
    third best child of the best child of the root.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        """`paths`: distinct, at least one, each with its parent (infer/settings/draft_tree.py)."""
        nodes = sorted(map(tuple, paths), key=lambda path: (len(path), path))
        self.most, self.depth = len(nodes), max(map(len, nodes))
        levels = [[path for path in nodes if len(path) == level] for level in range(1, self.depth + 1)]
        parents = {path[:-1] for path in nodes}
        self._fan_out = [1 + max(path[-1] for path in level) for level in levels]
        self._run: list[Tensor] = []  # per level, indices of its inner nodes
        self._scores: list[Tensor] = []  # per level [M * R]: minus the node's rank in level order
        grown: list[tuple[int, ...]] = [()]
        next_score = 0
        for level, fan_out in zip(levels, self._fan_out, strict=True):
            scores = torch.full((len(grown) * fan_out,), -torch.inf)
            place = {path: grown.index(path[:-1]) * fan_out + path[-1] for path in level}
            for path in level:
                scores[place[path]] = next_score = next_score - 1
            grown = [path for path in level if path in parents]
            self._scores.append(scores)
            self._run.append(torch.tensor([place[path] for path in grown], dtype=torch.int64))

    @property
    def widest(self) -> int:
        return max(self._fan_out)

    def fan_out(self, level: int) -> int:
        return self._fan_out[level - 1] if level <= self.depth else 0

    def fixed(self, level: int, device: torch.device) -> tuple[Tensor, Tensor]:
        for parts in (self._scores, self._run):
            parts[level - 1] = parts[level - 1].to(device)
        return self._scores[level - 1], self._run[level - 1]

    @property
    def rows(self) -> int:
        return sum(map(len, self._run))

    @property
    def width(self) -> int:
        return max(1, *map(len, self._run))


TreeShape = DynamicShape | StaticShape


def tree_shape(config: ProposerConfig) -> TreeShape | None:
    """Return the shape of the trees that a head grows; None for chains."""
    tree = config.shape
    if isinstance(tree, Measured):
        raise ValueError(f"proposer.tree={config.tree}: is read from a head's folder; Engine.load does that")
    if isinstance(tree, Beam):
        return DynamicShape(tree.width, tree.depth)
    return None if tree is None else StaticShape(tree)


Children = Callable[[int, int], tuple[Tensor, Tensor]]
Run = Callable[[int, Picked], None]


def grow(shape: TreeShape, deepest: int, roots: Tensor, children: Children, run: Run) -> Candidates:
    """Grow the trees of B requests at once; return all candidates.

    roots `[B]`. `children(level, R)` returns tokens and log-probabilities `[B, M, R]` of the best children of each of
    the M nodes that were run last (at first the root); M = 1 where all nodes of a level have the same children.
    `run(level, picked)` runs the nodes that the next level is grown from.
    """
    frontier, levels = Frontier.root(len(roots), roots.device), list[Level]()
    candidates = ran = level = 0
    while level < deepest and (fan_out := shape.fan_out(level + 1)):
        level += 1
        fixed, last = shape.fixed(level, roots.device), level == deepest or not shape.fan_out(level + 1)
        width, tokens = 0 if last else shape.width, children(level, fan_out)
        levels.append(grow_level(frontier, *tokens, fixed, width, first=candidates, ran=ran))
        if last:
            break
        picked = levels[-1].picked
        run(level, picked)
        frontier, ran = picked.frontier, ran + picked.token.shape[1]
        candidates += levels[-1].token.shape[1]
    token, parent, score = (torch.cat([getattr(one, name) for one in levels], dim=1) for name in Level._fields[:3])
    return Candidates(token, parent, numbered(tuple(one.token.shape[1] for one in levels), roots.device), score)


@cache
def numbered(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return 1 `counts[0]` times, 2 `counts[1]` times, ..."""
    return upload([level for level, count in enumerate(counts, start=1) for _ in range(count)], device)


def propose_best(roots: Sequence[int], grown: Candidates, budgets: Sequence[Budget]) -> DraftTree:
    """Return, on the host, the trees of the best candidates within each budget."""
    rows = [(*budget, root) for budget, root in zip(budgets, roots, strict=True)]
    nodes, depth, root = upload_lists(list(zip(*rows, strict=True)), grown.score.device)
    candidates = ((grown.score > -torch.inf) & (grown.level <= depth[:, None])).sum(1)
    width = int(torch.minimum(candidates, nodes).max())
    fields = best_nodes(root, grown, nodes, depth, width, max(budget.depth for budget in budgets))
    return DraftTree(*Nodes(*(field.cpu() for field in fields)))
