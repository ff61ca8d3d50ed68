"""`DraftTree`, the data structure in which all drafts reach verification, the `Budget` of one, and its outcome.

A chain is a tree; plain decoding is a tree of one node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.operands import Nodes
from kernels.tree import depths_and_masks

T = TypeVar("T", bound=Hashable)
MAX_NODES = 64  # bits of a node's tree mask, `ancestors`
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


def grouped(keys: Sequence[T]) -> dict[T, list[int]]:
    """Return the indices of each key."""
    groups: dict[T, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return groups


class VerifiedDraft(NamedTuple):
    """The outcome of a request's draft."""

    budget: Budget  # that it was drafted under
    nodes: int  # number of drafted nodes
    depth: int  # of the deepest of them
    path: Sequence[int]  # which of them were accepted, counted from 1


@cache
def chain_fields(width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return parents, depths and ancestors of a chain, `[N]` each."""
    node = torch.arange(width, dtype=torch.int32, device=device)
    tree_mask = (torch.ones((), dtype=torch.int64, device=device) << (node.long() + 1).clamp(max=63)) - 1
    if width == MAX_NODES:
        tree_mask[-1] = -1  # all 64 bits
    return node - 1, node, tree_mask


@dataclass
class DraftTree:
    """The draft trees of B requests, of at most N nodes each.

    Node 0 is the root: the last emitted token, whose KV is not yet written. Parents precede children; siblings carry
    distinct tokens. `ancestors` is the tree mask: bit j is set when node j is an ancestor of the node or the node
    itself. Entries of a row past `length` are undefined.
    """

    token: Tensor  # [B, N] int64
    parent: Tensor  # [B, N] int32, the root's is -1
    depth: Tensor  # [B, N] int32
    ancestors: Tensor  # [B, N] int64
    length: Tensor  # [B] int64
    is_chain: bool = False  # every node's parent is the node before it
    padded: bool = False  # the target runs all N entries of every row, those past `length` too
    max_depth: int = MAX_NODES - 1  # upper bound on the depth of any node
    # By row, the distributions over target ids `[K, V]` that its drafted tokens were drawn from, for block verification
    draft_probs: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def chains(cls, roots: Sequence[int], drafts: Sequence[Sequence[int]]) -> DraftTree:
        """Build one chain per request: the root followed by its drafted tokens, possibly none."""
        lengths = [len(draft) for draft in drafts]
        rows = [[*draft] + [0] * (max(lengths) - len(draft)) for draft in drafts]
        return cls.chain(torch.tensor(roots), torch.tensor(rows, dtype=torch.int64), torch.tensor(lengths))

    @classmethod
    def chain(cls, roots: Tensor, drafted: Tensor, counts: Tensor, *, padded: bool = False) -> DraftTree:
        """Build one chain per request, of its root `[B]` and the first `counts` `[B]` of `drafted` `[B, D]`."""
        width = 1 + drafted.shape[1]
        assert width <= MAX_NODES
        parent, depth, tree_mask = (x.expand(len(roots), width) for x in chain_fields(width, roots.device))
        token = torch.cat([roots[:, None], drafted], dim=1)
        return cls(token, parent, depth, tree_mask, 1 + counts, is_chain=True, padded=padded)

    @classmethod
    def assemble(cls, token: Tensor, parent: Tensor, length: Tensor) -> DraftTree:
        """Build a tree from a valid `token` and `parent` `[B, N]`; entries past `length` `[B]` may hold anything."""
        width = token.shape[1]
        above = torch.where(torch.arange(width, device=token.device) < length[:, None], parent.long(), 0).clamp(min=0)
        return cls(token, parent.int(), *depths_and_masks(above, width - 1), length)

    @classmethod
    def by_group(cls, keys: Sequence[T], draft: Callable[[T, list[int]], DraftTree]) -> DraftTree:
        """Draft for the rows of each key at once, and combine the batches."""
        groups = grouped(keys)
        trees = [draft(key, rows) for key, rows in groups.items()]
        return trees[0] if len(trees) == 1 else cls.stack(trees, list(groups.values()))

    @classmethod
    def stack(cls, trees: Sequence[DraftTree], rows: Sequence[Sequence[int]]) -> DraftTree:
        """Combine several batches into one: row i of `trees[t]` becomes row `rows[t][i]`."""
        width = max(tree.token.shape[1] for tree in trees)
        order = torch.tensor([row for tree_rows in rows for row in tree_rows]).argsort()

        def stacked(name: str) -> Tensor:
            fields = (getattr(tree, name) for tree in trees)
            return torch.cat([F.pad(field, (0, width - field.shape[1])) for field in fields])[order]

        return cls(
            token=stacked("token"),
            parent=stacked("parent"),
            depth=stacked("depth"),
            ancestors=stacked("ancestors"),
            length=torch.cat([tree.length for tree in trees])[order],
            is_chain=all(tree.is_chain for tree in trees),
            draft_probs={
                rows[t][row]: probs for t, tree in enumerate(trees) for row, probs in tree.draft_probs.items()
            },
        )

    def only(self, subset: Sequence[Sequence[int]]) -> DraftTree:
        """Return the tree of the nodes `subset[b]` of row b: ascending, with the root and every kept node's parent."""
        width = max(map(len, subset))
        token, parent = self.token.new_zeros(len(subset), width), self.parent.new_full((len(subset), width), -1)
        for b, nodes in enumerate(subset):
            index = torch.tensor(list(nodes))
            place = {node: new for new, node in enumerate(nodes)} | {-1: -1}
            token[b, : len(nodes)] = self.token[b, index]
            parents = [place[above] for above in self.parent[b, index].tolist()]
            parent[b, : len(nodes)] = torch.tensor(parents, dtype=parent.dtype)
        tree = DraftTree.assemble(token, parent, torch.tensor([len(nodes) for nodes in subset]))
        tree.is_chain = self.is_chain
        tree.draft_probs = {
            b: p[: len(subset[b]) - 1] for b, p in self.draft_probs.items()
        }  # chains only: node i's is row i - 1
        return tree

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.token, self.parent, self.depth, self.ancestors, self.length)

    @cached_property
    def inside(self) -> Tensor:
        """bool `[B, N]`: which entries are nodes."""
        return torch.arange(self.token.shape[1], device=self.token.device) < self.length[:, None]

    def rows(self, field: Tensor) -> Tensor:
        """Return the entries of a field `[B, N]` that the target runs, request by request: `[R]`."""
        return field.flatten() if self.padded or self.full else field[self.inside]

    @cached_property
    def full(self) -> bool:
        """Whether all requests have N nodes; waits for the device."""
        return int(self.length.sum()) == self.token.numel()

    def depths(self) -> list[int]:
        """Return the depth of each request's deepest node."""
        if self.is_chain:
            return (self.length - 1).tolist()
        return self.depth.masked_fill(~self.inside, 0).amax(1).tolist()

    def is_chain_of(self, row: int) -> bool:
        """Return whether this request's tree is a chain."""
        parents = self.parent[row, : int(self.length[row])].tolist()
        return self.is_chain or parents == list(range(-1, len(parents) - 1))

    def path(self, row: int, node: int) -> list[int]:
        """Return the nodes from the root to `node` in one request, both included."""
        mask = int(self.ancestors[row, node])
        return [index for index in range(self.token.shape[1]) if mask >> index & 1]

    @property
    def path_width(self) -> int:
        """An upper bound on the number of nodes of a path."""
        return min(self.token.shape[1], 1 + self.max_depth)
