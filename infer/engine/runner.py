"""Runs the target over the rows of a step: prefill, and the body of every decode step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from infer.kvcache.pool import KVPool
from infer.parallel.target_worker import Shard
from infer.request import Request
from infer.sampling.choose import Choices, choose_rows
from infer.speculation.tree import DraftTree
from infer.speculation.verify import verify
from kernels.rows import AttentionRows


class Rows(NamedTuple):
    hidden: Tensor  # [R, H] post-norm, rows of all requests concatenated
    aux: tuple[Tensor, ...]  # [R, H] each
    positions: Tensor  # [R]


class DecodeBatch(Protocol):
    """The B requests of a decode step, as the host has them or as they lie in the tensors of a CUDA graph."""

    @property
    def slots(self) -> Tensor: ...  # [B] rows of the block table

    @property
    def roots(self) -> Tensor: ...  # [B] positions

    def rows(self, tree: DraftTree) -> AttentionRows:
        """Address the nodes of every tree: node j of a request has place `roots[b] + j`."""
        ...

    def choose(self, tree: DraftTree, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the target's choice at every node `[B, N]`, from logits `[R, V]` at positions `[R]`."""
        ...

    def accept(self, tree: DraftTree, choice: Tensor) -> Tensor:
        """Return the last accepted node of each request, `[B]`."""
        ...


class HostBatch:
    """The requests of a step, sampled and verified with all that they may ask for; implements DecodeBatch."""

    choices: Choices  # once chosen

    def __init__(self, requests: list[Request], pool: KVPool, rates: Sequence[float]) -> None:
        self._requests, self._pool, self._rates = requests, pool, rates

    @property
    def slots(self) -> Tensor:
        return torch.tensor([request.slot for request in self._requests], device=self._pool.device)

    @property
    def roots(self) -> Tensor:
        return torch.tensor([request.computed for request in self._requests], device=self._pool.device)

    def rows(self, tree: DraftTree) -> AttentionRows:
        starts = [request.computed for request in self._requests]
        mask = None if tree.is_chain else tree.rows(tree.ancestors).to(self._pool.device)
        return self._pool.rows(self._requests, starts, tree.length.tolist(), mask)

    def choose(self, tree: DraftTree, logits: Tensor, positions: Tensor) -> Tensor:
        self.choices = choose_rows(self._requests, tree.length.tolist(), logits, positions, tree)
        choice = torch.full_like(tree.token, -1)
        choice[tree.inside] = self.choices.token.cpu()
        return choice

    def accept(self, tree: DraftTree, choice: Tensor) -> Tensor:
        return verify(self._requests, tree, self.choices, choice, self._rates)


class Decoded(NamedTuple):
    """The outcome of a decode step. Of each row of W entries the first `depth[b]` + 1 count."""

    token: Tensor  # [B, W] the accepted tokens, then the bonus token
    path: Tensor  # [B, W] the accepted nodes, the root first
    depth: Tensor  # [B] number of accepted tokens
    aux: tuple[Tensor, ...]  # [R, H] each: features of all nodes


class Runner:
    """Addresses rows in the pool and runs the shard on them."""

    def __init__(self, shard: Shard, pool: KVPool) -> None:
        self.shard, self.pool = shard, pool

    def prefill(self, requests: Sequence[Request], chunks: Sequence[int], aux: Sequence[int]) -> Rows:
        """Run the next `chunks[b]` positions of each request; `aux`: hidden states to return as features."""
        starts = [request.computed for request in requests]
        ids = [
            token
            for request, start, count in zip(requests, starts, chunks, strict=True)
            for token in request.tokens[start : start + count]
        ]
        rows = self.pool.rows(requests, starts, chunks)
        out = self.shard.forward(torch.tensor(ids, device=self.pool.device), rows.places, rows, aux)
        return Rows(out.hidden, out.aux, rows.places)

    def decode(self, tree: DraftTree, batch: DecodeBatch, aux: Sequence[int]) -> Decoded:
        """Run the target over all nodes, choose its tokens, accept what equals them, move the accepted KV to the front.

        The one body of every decode step: of those whose requests need the host, and of those that a CUDA graph
        captures, in which nothing waits for the host.
        """
        device, rows = self.pool.device, batch.rows(tree)
        positions = rows.places if tree.is_chain else rows.committed + tree.rows(tree.depth).to(device)
        out = self.shard.forward(tree.rows(tree.token).to(device), positions, rows, aux)
        choice = batch.choose(tree, self.logits(out.hidden), positions)
        last = batch.accept(tree, choice)
        path, depth = tree.paths(last)
        if not tree.is_chain:
            self.pool.move(batch.slots, batch.roots, path, depth)
        following = path.roll(-1, dims=1)
        accepted = torch.arange(path.shape[1], device=path.device) < depth[:, None]
        token = torch.where(accepted, tree.token.gather(1, following), choice.gather(1, path))
        return Decoded(token, path, depth, out.aux)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.shard.logits(hidden)
