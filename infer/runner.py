"""Runs the target over the rows of a step: paged KV in, logits and features out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.kv_cache import KVPool
from infer.request import Request
from infer.tree import DraftTree
from models.targets.llama import LlamaTarget, TargetOutput


class Rows(NamedTuple):
    hidden: Tensor  # [R, H] post-norm, rows of all requests one after another
    features: Tensor  # [R, len(aux) * H]
    positions: Tensor  # [R]


class Runner:
    """The target with its part of the pool: layers 0 .. num_layers - 1."""

    def __init__(self, target: LlamaTarget, pool: KVPool) -> None:
        self._target, self._pool = target, pool

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
        inside = torch.arange(tree.token.shape[1], device=tree.token.device) < tree.length[:, None]
        return self._forward(requests, starts, counts, tree.token[inside].to(self._pool.device), tree, aux)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden)

    def _forward(
        self,
        requests: Sequence[Request],
        starts: Sequence[int],
        counts: Sequence[int],
        ids: Tensor,
        tree: DraftTree | None,
        aux: Sequence[int],
    ) -> Rows:
        config, device = self._target.config, self._pool.device
        words, depth = None, None
        if tree is not None and not tree.is_chain:
            inside = torch.arange(tree.token.shape[1]) < tree.length[:, None]
            words, depth = tree.ancestors[inside].to(device), tree.depth[inside].to(device)
        rows = self._pool.rows(requests, starts, counts, words)
        positions = rows.places if depth is None else rows.committed + depth
        attention = self._pool.attention(rows, config.num_heads, config.num_kv_heads, config.head_dim)
        out: TargetOutput = self._target(ids, positions, attention, aux_layers=aux)
        features = torch.cat(out.aux, dim=-1) if out.aux else out.hidden[:, :0]
        return Rows(out.hidden, features, positions)
