"""Runs the target over the rows of a step: takes requests and draft trees, returns logits and features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from infer.kvcache.pool import KVPool
from infer.parallel.target_worker import Shard
from infer.request import Request
from infer.speculation.tree import DraftTree

if TYPE_CHECKING:
    from infer.graphs.verify_graphs import VerifyGraphs


class Rows(NamedTuple):
    hidden: Tensor  # [R, H] post-norm, rows of all requests concatenated
    aux: tuple[Tensor, ...]  # [R, H] each
    positions: Tensor  # [R]


class VerifyOutput(NamedTuple):
    """Results for all nodes of all trees, concatenated over requests. Valid until the next verify."""

    logits: Tensor  # [R, V]
    aux: tuple[Tensor, ...]  # [R, H] each
    positions: Tensor  # [R]


class Runner:
    """Addresses rows in the pool and runs the shard on them; `graphs` replay verifies of the captured sizes."""

    def __init__(self, shard: Shard, pool: KVPool) -> None:
        self._shard, self.pool = shard, pool
        self.graphs: VerifyGraphs | None = None

    def prefill(self, requests: Sequence[Request], chunks: Sequence[int], aux: Sequence[int]) -> Rows:
        """Run the next `chunks[b]` positions of each request; `aux`: hidden states to return as features."""
        starts = [request.computed for request in requests]
        ids = [
            token
            for request, start, count in zip(requests, starts, chunks, strict=True)
            for token in request.tokens[start : start + count]
        ]
        return self._forward(requests, starts, chunks, torch.tensor(ids, device=self.pool.device), None, aux)

    def verify(self, requests: Sequence[Request], tree: DraftTree, aux: Sequence[int]) -> VerifyOutput:
        """Run all nodes of every tree; node j of a request has place `computed + j`, position `computed + depth`."""
        replayed = self.graphs and self.graphs.verify(requests, tree, aux)
        if replayed:
            return replayed
        starts = [request.computed for request in requests]
        counts = tree.length.tolist()
        rows = self._forward(requests, starts, counts, tree.rows(tree.token).to(self.pool.device), tree, aux)
        return VerifyOutput(self.logits(rows.hidden), rows.aux, rows.positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._shard.logits(hidden)

    def _forward(
        self,
        requests: Sequence[Request],
        starts: Sequence[int],
        counts: Sequence[int],
        ids: Tensor,
        tree: DraftTree | None,
        aux: Sequence[int],
    ) -> Rows:
        device, tree_mask, depth = self.pool.device, None, None
        if tree is not None and not tree.is_chain:
            tree_mask, depth = tree.rows(tree.ancestors).to(device), tree.rows(tree.depth).to(device)
        rows = self.pool.rows(requests, starts, counts, tree_mask)
        positions = rows.places if depth is None else rows.committed + depth
        out = self._shard.forward(ids, positions, rows, aux)
        return Rows(out.hidden, out.aux, positions)
