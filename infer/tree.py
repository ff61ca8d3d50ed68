"""DraftTree: the one shape in which drafts reach verification. A chain is a tree, plain decoding a tree of one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NODES = 64  # bits of an ancestor word


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

    @classmethod
    def chains(cls, roots: Sequence[int], drafts: Sequence[Sequence[int]]) -> DraftTree:
        """One chain per request: the root followed by its drafted tokens, possibly none."""
        lengths = [1 + len(draft) for draft in drafts]
        width = max(lengths)
        assert width <= MAX_NODES
        rows = [[root, *draft] + [0] * (width - 1 - len(draft)) for root, draft in zip(roots, drafts, strict=True)]
        batch = len(rows)
        node = torch.arange(width, dtype=torch.int32)
        words = (torch.ones((), dtype=torch.int64) << (node.long() + 1).clamp(max=63)) - 1
        if width == MAX_NODES:
            words[-1] = -1  # all 64 bits
        return cls(
            token=torch.tensor(rows),
            parent=(node - 1).expand(batch, width),
            depth=node.expand(batch, width),
            ancestors=words.expand(batch, width),
            length=torch.tensor(lengths),
            is_chain=True,
        )

    @classmethod
    def from_parents(cls, token: Tensor, parent: Tensor, length: Tensor) -> DraftTree:
        """Builds depths and ancestor words from `parent` `[B, N]`. Raises ValueError for an invalid tree."""
        batch, width = token.shape
        if width > MAX_NODES:
            raise ValueError(f"a draft tree holds at most {MAX_NODES} nodes, not {width}")
        depth = torch.zeros(batch, width, dtype=torch.int32)
        ancestors = torch.ones(batch, width, dtype=torch.int64)
        for node in range(1, width):
            above = parent[:, node].long()
            inside = node < length
            if bool((inside & ((above < 0) | (above >= node))).any()):
                raise ValueError(f"node {node}: its parent must be one of the nodes before it")
            above = above.clamp(0, node - 1)[:, None]
            depth[:, node] = depth.gather(1, above)[:, 0] + 1
            ancestors[:, node] = ancestors.gather(1, above)[:, 0] | (1 << node if node < 63 else -(2**63))
            twins = (parent[:, :node] == parent[:, node, None]) & (token[:, :node] == token[:, node, None])
            twins[:, 0] = False
            if bool((twins.any(1) & inside).any()):
                raise ValueError(f"node {node}: a sibling carries the same token")
        return cls(token, parent.int(), depth, ancestors, length)

    def path(self, row: int, node: int) -> list[int]:
        """Nodes from the root to `node` in one request, both included."""
        word = int(self.ancestors[row, node])
        return [index for index in range(self.token.shape[1]) if word >> index & 1]
