"""Runs the target over the rows of a step: prefill, and the body of every decode step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from infer.batch.tree import DraftTree
from infer.kvcache.pool import KVPool
from infer.processes.target_worker import Shard
from infer.request import Request
from infer.sampling.choose import Choices, choose_rows, row_parameters
from infer.speculation.verify import verify_by_rules
from kernels.copies import sent, upload
from kernels.rows import AttentionRows
from kernels.verify import Accepted, accept, accepted_path


class Rows(NamedTuple):
    hidden: Tensor  # [R, H] post-norm, rows of all requests concatenated
    aux: tuple[Tensor, ...]  # [R, H] each
    positions: Tensor  # [R]


class Replays(Protocol):
    """Captured forwards (infer/graphs/forward_graph.py)."""

    def replay(self, tree: DraftTree, requests: Sequence[Request], aux: Sequence[int]) -> Rows | None:
        """Return the rows of a verify; None if it fits no graph."""
        ...


class DecodeBatch(Protocol):
    """The B requests of a decode step, as the host has them or as they lie in the tensors of a CUDA graph."""

    def forward(self, tree: DraftTree, runner: Runner, aux: Sequence[int]) -> Rows:
        """Run the target over the nodes of every tree: node j of a request has place `roots[b] + j`."""
        ...

    def choose(self, tree: DraftTree, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the target's choice at every node `[B, N]`, from logits `[R, V]` at positions `[R]`."""
        ...

    def accept(self, tree: DraftTree, choice: Tensor) -> Accepted:
        """Return what is accepted, and which KV moves to the front of its tree."""
        ...


class HostBatch:
    """The requests of a step, sampled and verified with all that they may ask for; implements DecodeBatch."""

    choices: Choices  # once chosen

    def __init__(self, requests: list[Request], tree: DraftTree, pool: KVPool, rates: Sequence[float]) -> None:
        self.requests, self._pool, self._rates = requests, pool, rates
        self._counts = tree.length.tolist()
        self._parameters = row_parameters(requests, self._counts, pool.device)

    def forward(self, tree: DraftTree, runner: Runner, aux: Sequence[int]) -> Rows:
        if runner.graphs is not None and (replayed := runner.graphs.replay(tree, self.requests, aux)) is not None:
            return replayed
        fields = (tree.token,) if tree.is_chain else (tree.token, tree.depth, tree.ancestors)
        ids, *of_trees = (sent(tree.rows(field), self._pool.device) for field in fields)
        rows = self._pool.rows(self.requests, [r.computed for r in self.requests], self._counts, *of_trees[1:])
        return runner.forward(ids, rows, aux, *of_trees[:1])

    def choose(self, tree: DraftTree, logits: Tensor, positions: Tensor) -> Tensor:
        self.choices = choose_rows(self.requests, self._counts, self._parameters, logits, positions, tree)
        choice = torch.full_like(tree.token, -1)
        choice[tree.inside] = self.choices.token.cpu()
        return choice

    def accept(self, tree: DraftTree, choice: Tensor) -> Accepted:
        if all(request.rule == "exact" for request in self.requests):
            last = accept(tree.nodes, choice)
        else:
            last = verify_by_rules(self.requests, tree, self.choices, choice, self._rates)
        accepted = accepted_path(tree.token, None if tree.is_chain else tree.ancestors, last, choice, tree.path_width)
        return accepted._replace(moves=self._pool.settle(self.requests, accepted, chains=tree.is_chain))


class Decoded(NamedTuple):
    accepted: Accepted
    aux: tuple[Tensor, ...]  # [R, H] each: features of all nodes


class Runner:
    """Addresses rows in the pool and runs the shard on them. `graphs`: for decode steps of the host, if captured."""

    def __init__(self, shard: Shard, pool: KVPool) -> None:
        self.shard, self.pool = shard, pool
        self.graphs: Replays | None = None

    def prefill(self, requests: Sequence[Request], chunks: Sequence[int], aux: Sequence[int]) -> Rows:
        """Run the next `chunks[b]` positions of each request; `aux`: hidden states to return as features."""
        starts = [request.computed for request in requests]
        ids = [
            token
            for request, start, count in zip(requests, starts, chunks, strict=True)
            for token in request.tokens[start : start + count]
        ]
        return self.forward(upload(ids, self.pool.device), self.pool.rows(requests, starts, chunks), aux)

    def decode(self, tree: DraftTree, batch: DecodeBatch, aux: Sequence[int]) -> Decoded:
        """Run the target over all nodes, choose its tokens, accept what equals them, move the accepted KV to the front.

        The one body of every decode step: of those whose requests need the host, and of those that a CUDA graph
        captures, in which nothing waits for the host.
        """
        rows = batch.forward(tree, self, aux)
        choice = batch.choose(tree, self.shard.logits(rows.hidden), rows.positions)
        accepted = batch.accept(tree, choice)
        if accepted.moves is not None:
            self.pool.layers.move(*accepted.moves)
        return Decoded(accepted, rows.aux)

    def forward(self, ids: Tensor, rows: AttentionRows, aux: Sequence[int], depths: Tensor | None = None) -> Rows:
        """Run the target on ids `[R]`. `depths` `[R]`: of nodes of trees, whose places are not their positions."""
        positions = rows.places if depths is None else rows.committed + depths
        out = self.shard.forward(ids, positions, rows, aux)
        return Rows(out.hidden, out.aux, positions)
