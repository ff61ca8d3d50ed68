"""DraftTree: the one shape in which drafts reach verification. A chain is a tree, plain decoding a tree of one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_NODES = 64  # bits of an ancestor word


@cache
def chain_fields(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """`[N]` each, of a chain: parents, depths and ancestors."""
    node = torch.arange(width, dtype=torch.int32)
    words = (torch.ones((), dtype=torch.int64) << (node.long() + 1).clamp(max=63)) - 1
    if width == MAX_NODES:
        words[-1] = -1  # all 64 bits
    return node - 1, node, words


@dataclass
class DraftTree:
    """Nodes of a batch of B requests, N at most. Node 0 is the root: the last emitted token, its KV not yet written.

    Parents precede children; siblings carry distinct tokens. `ancestors` holds bit j when node j is an ancestor of the
    node or the node itself. Past `length` a row's entries mean nothing.
    """

    token: Tensor  # [B, N] int64
    parent: Tensor  # [B, N] int32, the root's is -1
    depth: Tensor  # [B, N] int32
    ancestors: Tensor  # [B, N] int64
    length: Tensor  # [B] int64
    is_chain: bool = False  # every node's parent is the node before it
    # The laws over target ids `[K, V]` that a row's drafted tokens were drawn from, where block verification wants them
    laws: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def chains(cls, roots: Sequence[int], drafts: Sequence[Sequence[int]]) -> DraftTree:
        """One chain per request: the root followed by its drafted tokens, possibly none."""
        lengths = [1 + len(draft) for draft in drafts]
        width = max(lengths)
        assert width <= MAX_NODES
        rows = [[root, *draft] + [0] * (width - 1 - len(draft)) for root, draft in zip(roots, drafts, strict=True)]
        parent, depth, words = (field.expand(len(rows), width) for field in chain_fields(width))
        return cls(
            token=torch.tensor(rows),
            parent=parent,
            depth=depth,
            ancestors=words,
            length=torch.tensor(lengths),
            is_chain=True,
        )

    @classmethod
    def from_parents(cls, token: Tensor, parent: Tensor, length: Tensor) -> DraftTree:
        """Checks `token` and `parent` `[B, N]` and builds the rest. Raises ValueError for an invalid tree."""
        width = token.shape[1]
        if width > MAX_NODES:
            raise ValueError(f"a draft tree holds at most {MAX_NODES} nodes, not {width}")
        for node in range(1, width):
            above, inside = parent[:, node], node < length
            if bool((inside & ((above < 0) | (above >= node))).any()):
                raise ValueError(f"node {node}: its parent must be one of the nodes before it")
            twins = (parent[:, :node] == above[:, None]) & (token[:, :node] == token[:, node, None])
            twins[:, 0] = False
            if bool((twins.any(1) & inside).any()):
                raise ValueError(f"node {node}: a sibling carries the same token")
        return cls.assemble(token, parent, length)

    @classmethod
    def assemble(cls, token: Tensor, parent: Tensor, length: Tensor, *, deepest: int | None = None) -> DraftTree:
        """From a valid `token` and `parent` `[B, N]`; entries past `length` `[B]` may hold anything.

        Where no node can be deeper than `deepest`, nothing is asked of the tensors' device.
        """
        width, device = token.shape[1], token.device
        node = torch.arange(width, device=device)
        above = torch.where(node < length[:, None], parent.long(), 0).clamp(min=0)
        own = torch.ones((), dtype=torch.int64, device=device) << node  # bit 63 is the sign
        ancestors, depth = own.expand_as(above), (node > 0).int().expand_as(above)
        reach = above  # an ancestor 2^i levels up, the root for those who have none
        turns = range(MAX_NODES) if deepest is None else range(deepest.bit_length())
        for _ in turns:  # doubling: each turn looks twice as far up
            if deepest is None and not bool((reach > 0).any()):
                break
            depth = depth + depth.gather(1, reach)
            ancestors = ancestors | ancestors.gather(1, reach)
            reach = reach.gather(1, reach)
        return cls(token, parent.int(), depth, ancestors | 1, length)

    @classmethod
    def stack(cls, trees: Sequence[DraftTree], rows: Sequence[Sequence[int]]) -> DraftTree:
        """One batch out of several: row i of `trees[t]` becomes row `rows[t][i]`."""
        width = max(tree.token.shape[1] for tree in trees)
        order = torch.tensor([row for own in rows for row in own]).argsort()

        def joined(name: str) -> Tensor:
            fields = (getattr(tree, name) for tree in trees)
            return torch.cat([F.pad(field, (0, width - field.shape[1])) for field in fields])[order]

        return cls(
            token=joined("token"),
            parent=joined("parent"),
            depth=joined("depth"),
            ancestors=joined("ancestors"),
            length=torch.cat([tree.length for tree in trees])[order],
            is_chain=all(tree.is_chain for tree in trees),
            laws={rows[t][row]: law for t, tree in enumerate(trees) for row, law in tree.laws.items()},
        )

    def only(self, kept: Sequence[Sequence[int]]) -> DraftTree:
        """A tree of fewer nodes: in row b those of `kept[b]`, ascending, with the root and every node's parent."""
        width = max(map(len, kept))
        token, parent = self.token.new_zeros(len(kept), width), self.parent.new_full((len(kept), width), -1)
        for b, nodes in enumerate(kept):
            index = torch.tensor(list(nodes))
            place = {node: new for new, node in enumerate(nodes)} | {-1: -1}
            token[b, : len(nodes)] = self.token[b, index]
            parents = [place[above] for above in self.parent[b, index].tolist()]
            parent[b, : len(nodes)] = torch.tensor(parents, dtype=parent.dtype)
        tree = DraftTree.assemble(token, parent, torch.tensor([len(nodes) for nodes in kept]))
        tree.is_chain = self.is_chain
        tree.laws = {b: law[: len(kept[b]) - 1] for b, law in self.laws.items()}  # of chains: a node's law is before it
        return tree

    @cached_property
    def inside(self) -> Tensor:
        """bool `[B, N]`: which entries are nodes."""
        return torch.arange(self.token.shape[1], device=self.token.device) < self.length[:, None]

    def rows(self, field: Tensor) -> Tensor:
        """Of a field `[B, N]` what belongs to nodes, one request's after another's: `[R]`."""
        return field.flatten() if self.full else field[self.inside]

    @cached_property
    def full(self) -> bool:
        """Whether all requests have as many nodes; asks the device."""
        return int(self.length.sum()) == self.token.numel()

    def depths(self) -> list[int]:
        """Of each request's deepest node."""
        if self.is_chain:
            return (self.length - 1).tolist()
        return self.depth.masked_fill(~self.inside, 0).amax(1).tolist()

    def is_chain_of(self, row: int) -> bool:
        """Whether this request's own tree is a chain."""
        parents = self.parent[row, : int(self.length[row])].tolist()
        return self.is_chain or parents == list(range(-1, len(parents) - 1))

    def path(self, row: int, node: int) -> list[int]:
        """Nodes from the root to `node` in one request, both included."""
        word = int(self.ancestors[row, node])
        return [index for index in range(self.token.shape[1]) if word >> index & 1]
