"""CUDA graphs of the target's verify step: rows are padded to the size of a bucket, in static tensors.

A request's padding rows take the places after its real rows, where nothing is committed; padding requests use the null
block. No row attends to what comes after it, so padding does not change the bits of any other row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from infer.engine.runner import VerifyOutput
from infer.graphs.cuda_graph import Buckets, Graph, GraphMemory
from infer.kvcache.pool import KVPool
from infer.parallel.target_worker import Shard
from infer.request import Request
from infer.speculation.tree import DraftTree
from kernels.rows import AttentionRows

FIELDS = 5  # ids, positions, block-table rows, committed places, tree mask


class VerifyGraphs:
    """One graph per bucket; `recordings(trees=True)` adds one with a tree mask.

    `aux`: the hidden states that every graph outputs as features.
    """

    def __init__(self, shard: Shard, pool: KVPool, buckets: Buckets, aux: Sequence[int], memory: GraphMemory) -> None:
        self._shard, self._pool, self._buckets, self._aux, self._memory = shard, pool, buckets, tuple(aux), memory
        size = FIELDS * max(batch * rows for batch, rows in buckets.all())
        # Never written while a copy from it is pending: every step ends by waiting for its verdicts.
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=memory.pool is not None)
        self._device = torch.zeros(size, dtype=torch.int64, device=pool.device)
        config, rows = shard.target.config, size // FIELDS
        self._logits = torch.empty(rows, config.vocab_size, dtype=shard.dtype, device=pool.device)
        self._states = torch.empty(len(self._aux), rows, config.hidden_size, dtype=shard.dtype, device=pool.device)
        self._graphs: dict[tuple[int, int, bool], Graph[None]] = {}

    def recordings(self, *, trees: bool) -> list[Callable[[], object]]:
        """Return the captures, to be called in this order before the first step."""
        kinds = (False, True) if trees else (False,)
        return [
            partial(self._record, *sizes, tree)
            for sizes in self._buckets.all()
            for tree in kinds
            if sizes[1] > 1 or not tree
        ]

    def verify(self, requests: Sequence[Request], tree: DraftTree, aux: Sequence[int]) -> VerifyOutput | None:
        """Verify as `Runner.verify` does; return None if no graph fits."""
        starts, width = [request.computed for request in requests], tree.token.shape[1]
        sizes = self._buckets.fit(len(requests), width)
        fits = sizes is not None and max(starts) + sizes[1] <= self._buckets.longest
        if not fits or tuple(aux) not in ((), self._aux):
            return None
        assert sizes is not None
        graph = self._graphs.get((*sizes, not tree.is_chain))
        if graph is None:
            return None
        self._fill(*sizes, requests, starts, tree)
        graph()
        positions = self._fields(self._device, *sizes)[1].flatten()
        index = unpadded_rows(tree.length, sizes[1])
        if index is not None:
            index = index.to(self._pool.device, non_blocking=True)
        count = len(requests) * sizes[1]

        def trim(rows: Tensor) -> Tensor:
            return rows[:count] if index is None else rows[index]

        return VerifyOutput(trim(self._logits), tuple(map(trim, self._states)) if aux else (), trim(positions))

    def _fields(self, flat: Tensor, batch: int, rows: int) -> Tensor:
        return flat[: FIELDS * batch * rows].view(FIELDS, batch, rows)

    def _fill(self, batch: int, rows: int, requests: Sequence[Request], starts: Sequence[int], tree: DraftTree) -> None:
        host, inside = self._fields(self._host, batch, rows), tree.inside
        ids, positions, request, committed, tree_mask = host
        count, width = inside.shape
        host[:4] = 0
        request[:] = self._pool.null_row
        request[:count] = torch.tensor([r.slot for r in requests])[:, None]
        start = torch.tensor(starts)[:, None]
        committed[:count] = start
        ids[:count, :width] = tree.token.masked_fill(~inside, 0)
        positions[:count, :width] = (start + tree.depth).masked_fill(~inside, 0)
        if not tree.is_chain:
            tree_mask[:] = torch.ones((), dtype=torch.int64) << torch.arange(rows)
            tree_mask[:count, :width] = torch.where(inside, tree.ancestors, tree_mask[:count, :width])
        self._fields(self._device, batch, rows).copy_(host, non_blocking=True)

    def _record(self, batch: int, rows: int, tree: bool) -> None:
        self._fields(self._host, batch, rows)[:] = 0
        fields = self._fields(self._device, batch, rows)
        fields.zero_()
        fields[2] = self._pool.null_row
        ids, positions, request, committed, tree_mask = fields.flatten(1)
        offset = torch.arange(rows, device=self._pool.device).repeat(batch)
        counts, longest = (rows,) * batch, self._buckets.longest
        if tree:
            tree_mask[:] = torch.ones((), dtype=torch.int64, device=tree_mask.device) << offset

        def run() -> None:
            attention_rows = AttentionRows(
                self._pool.table,
                request,
                committed,
                offset,
                tree_mask if tree else None,
                self._pool.page_size,
                longest,
                counts,
            )
            out = self._shard.forward(ids, positions, attention_rows, self._aux)
            self._logits[: len(ids)] = self._shard.logits(out.hidden)
            for into, states in zip(self._states, out.aux, strict=True):
                into[: len(ids)] = states

        self._graphs[batch, rows, tree] = Graph(run, self._memory)


def unpadded_rows(lengths: Tensor, rows: int) -> Tensor | None:
    """Return the indices of each request's first `lengths[b]` of `rows` rows; None if that is all rows."""
    if bool((lengths == rows).all()):
        return None
    offset = torch.arange(rows)
    return (torch.arange(len(lengths))[:, None] * rows + offset)[offset < lengths[:, None]]
