"""Which nodes a tree-drafting head grows and which of them it proposes: pure functions of the draft's scores.

A level is grown from nodes that were run through the head (level 1 from the root): each of M nodes contributes its R
best children, the candidates. A node is identified by its candidate index, which counts over all levels in the order in
which they were grown; the root is -1.

A shape has a `depth` and, of nodes that are run through the head, `rows` over all levels and at most `width` in one.
At most `most` nodes can be proposed. `fan_out(level)` is R, the candidates at `level` (1, 2, ...) per node of the level
before that is run; 0 ends the tree. `score` returns the scores `[B, M * R]` of a level's candidates from their
cumulative log-probabilities, -inf for one that must not be proposed, and `run_next` the indices `[B, M']` in this level
of the nodes that the next one is grown from, best first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.config import ProposerConfig
from infer.options.draft_tree import Beam, Measured
from infer.speculation.budget import Budget
from infer.speculation.tree import DraftTree


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

    def score(self, level: int, cumulative: Tensor) -> Tensor:
        return cumulative

    def run_next(self, level: int, scores: Tensor) -> Tensor:
        return scores.sort(dim=1, descending=True, stable=True).indices[:, : self.width]


class StaticShape:
    """A tree given as data, in Medusa's notation: each node is the path of ranks that leads to it, (0, 2) being the
    third best child of the best child of the root.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        """`paths`: distinct, at least one, each with its parent (infer/options/draft_tree.py)."""
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

    def score(self, level: int, cumulative: Tensor) -> Tensor:
        self._scores[level - 1] = scores = self._scores[level - 1].to(cumulative.device)
        return scores.expand_as(cumulative)

    def run_next(self, level: int, scores: Tensor) -> Tensor:
        self._run[level - 1] = indices = self._run[level - 1].to(scores.device)
        return indices.expand(len(scores), -1)

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
Run = Callable[[int, Tensor, Tensor], None]
# All candidates: token `[B, C]`, parent `[B, C]` (candidate index, -1 = root), level `[C]` from 1, score `[B, C]`.
Grown = tuple[Tensor, Tensor, Tensor, Tensor]


def grow(shape: TreeShape, deepest: int, roots: Tensor, children: Children, run: Run) -> Grown:
    """Grow the trees of B requests at once; return all candidates.

    roots `[B]`. `children(level, R)` returns tokens and log-probabilities `[B, M, R]` of the best children of each of
    the M nodes that were run last (at first the root); M = 1 where all nodes of a level have the same children.
    `run(level, parent, token)` runs the nodes `[B, M']` that the next level is grown from; `parent` is the index of
    each one's parent among the M.
    """
    batch, device = len(roots), roots.device
    log_probs = torch.zeros(batch, 1, device=device)  # [B, M] cumulative log-probability of the nodes run last
    above = torch.full((batch, 1), -1, device=device)  # [B, M] their candidate indices
    grown: list[tuple[Tensor, Tensor, Tensor]] = []  # token, parent, score [B, M * R] of each level
    candidates = level = 0
    while level < deepest and (fan_out := shape.fan_out(level + 1)):
        level += 1
        token, value = children(level, fan_out)
        M, R = log_probs.shape[1], token.shape[2]
        token = token.expand(batch, M, R).flatten(1)
        cumulative = (log_probs[..., None] + value).flatten(1)
        scores = shape.score(level, cumulative)
        grown.append((token, above.repeat_interleave(R, dim=1), scores))
        if level == deepest or not shape.fan_out(level + 1):
            break
        picked = shape.run_next(level, scores)  # [B, M']
        run(level, picked // R, token.gather(1, picked))
        log_probs, above = cumulative.gather(1, picked), candidates + picked
        candidates += token.shape[1]
    levels = [torch.full_like(token[0], depth) for depth, (token, _, _) in enumerate(grown, start=1)]
    token, parent, score = (torch.cat(parts, dim=1) for parts in zip(*grown, strict=True))
    return token, parent, torch.cat(levels), score


def propose_best(roots: Sequence[int], grown: Grown, budgets: Sequence[Budget]) -> DraftTree:
    """Return, on the host, the trees of the best candidates within each budget."""
    level, score = grown[2:]
    rows = [(*budget, root) for budget, root in zip(budgets, roots, strict=True)]
    nodes, depth, root = torch.tensor(rows, device=score.device).T
    candidates = ((score > -torch.inf) & (level <= depth[:, None])).sum(1)
    fields = best_nodes(root, grown, nodes, depth, int(torch.minimum(candidates, nodes).max()))
    return DraftTree.assemble(*(field.cpu() for field in fields))


def best_nodes(roots: Tensor, grown: Grown, nodes: Tensor, depth: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, parent `[B, 1 + width]` and length `[B]` of the trees of the best candidates, best first.

    A tree has the root `roots[b]` and at most `nodes[b]` <= `width` candidates, none deeper than `depth[b]`; those of
    score -inf are left out. No candidate may score higher than its parent or precede it, so parents come first. The
    host does not wait for the device.
    """
    token, parent, level, score = grown
    best = score.masked_fill(level > depth[:, None], -torch.inf).sort(dim=1, descending=True, stable=True)
    values, chosen = best.values[:, :width], best.indices[:, :width]
    rank = torch.arange(chosen.shape[1], device=token.device)
    count = ((rank < nodes[:, None]) & (values > -torch.inf)).sum(1)
    node_of = torch.zeros_like(parent).scatter_(1, chosen, (rank + 1).expand_as(chosen))
    above = parent.gather(1, chosen)
    above = torch.where(above < 0, 0, node_of.gather(1, above.clamp(min=0)))
    root = roots[:, None]
    token = torch.cat([root, token.gather(1, chosen)], dim=1)
    return token, torch.cat([torch.full_like(root, -1), above], dim=1), count + 1
