"""Runs the target over the rows of a step: requests and trees in, logits and features out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.kv_cache import KVPool
from infer.request import Request
from infer.shard import Shard
from infer.tree import DraftTree


class Rows(NamedTuple):
    hidden: Tensor  # [R, H] post-norm, rows of all requests one after another
    features: Tensor  # [R, len(aux) * H]
    positions: Tensor  # [R]


class Runner:
    """Addresses rows in the pool and hands them to the shard."""

    def __init__(self, shard: Shard, pool: KVPool) -> None:
        self._shard, self._pool = shard, pool

    def prefill(self, requests: Sequence[Request], chunks: Sequence[int], aux: Sequence[int]) -> Rows:
        """The next `chunks[b]` positions of each request's tokens; `aux` are the hidden states wanted as features."""
        starts = [request.computed for request in requests]
        ids = [
            token
            for request, start, count in zip(requests, starts, chunks, strict=True)
            for token in request.tokens[start : start + count]
        ]
        return self._forward(requests, starts, chunks, torch.tensor(ids, device=self._pool.device), None, aux)

    def verify(self, requests: Sequence[Request], tree: DraftTree, aux: Sequence[int]) -> Rows:
        """All nodes of every tree; node j of a request goes to place `computed + j`, at position `computed + depth`."""
        starts = [request.computed for request in requests]
        counts = tree.length.tolist()
        return self._forward(requests, starts, counts, tree.token[tree.inside].to(self._pool.device), tree, aux)

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
        device, words, depth = self._pool.device, None, None
        if tree is not None and not tree.is_chain:
            words, depth = tree.ancestors[tree.inside].to(device), tree.depth[tree.inside].to(device)
        rows = self._pool.rows(requests, starts, counts, words)
        positions = rows.places if depth is None else rows.committed + depth
        out = self._shard.forward(ids, positions, rows, aux)
        features = torch.cat(out.aux, dim=-1) if out.aux else out.hidden[:, :0]
        return Rows(out.hidden, features, positions)
