"""Tensor parallelism in serving: rank 0 runs the engine, and the others repeat its operations on their target parts.

Only operations on the target's tensors are repeated: forwards, logits, and moves and copies of KV. Requests, drafts and
sampling exist on rank 0 only, and so do the layers of proposers. Forwards over whole sequences, without KV, are for
training. How a target is split, and why no bit changes: models/parallel.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.kvcache.tensors import KVLayers, LayerShape
from infer.parallel.comm import Ranks
from infer.parallel.target_worker import Shard
from kernels.linear import WeightFormat
from kernels.rows import AttentionRows
from models.attention import Attention, CausalAttention
from models.targets.llama import LlamaTarget, TargetOutput

FREE, ALLOCATE, FORWARD, LOGITS, MOVE, COPY, SEQUENCES = range(7)


class LeadingShard(Shard):
    """Rank 0's part of the target; the other ranks run each of its operations on their parts at the same time."""

    def __init__(
        self,
        target: LlamaTarget,
        ranks: Ranks,
        *,
        exact: bool = True,
        weights: WeightFormat = "same",
        kv: str = "same",
    ) -> None:
        super().__init__(target, exact=exact, weights=weights, kv=kv)
        ranks.connect()
        self.ranks, self._ranks = ranks.count, ranks
        self._make_layers = partial(LeadingLayers, ranks)
        # Patched on the LM head itself, since draft heads share that layer and call it.
        target.lm_head.forward = partial(lead_logits, ranks, target.lm_head.forward)
        target.forward = partial(lead_sequences, ranks, target.forward)
        self._end = weakref.finalize(self, ranks.close)  # also when the interpreter exits

    def free(self) -> int | None:
        with self._ranks.leading(FREE):
            return self._ranks.least(super().free())

    def allocate(self, num_pages: int, page_size: int, others: Sequence[LayerShape] = ()) -> KVLayers:
        with self._ranks.leading(ALLOCATE, [num_pages, page_size]):
            return super().allocate(num_pages, page_size, others)

    def forward(self, ids: Tensor, positions: Tensor, rows: AttentionRows, aux: Sequence[int]) -> TargetOutput:
        numbers, tensors = pack_rows(rows)
        with self._ranks.leading(FORWARD, [*numbers, *aux], [ids, positions, *tensors]):
            return super().forward(ids, positions, rows, aux)

    def close(self) -> None:
        self._end()


def lead_logits(ranks: Ranks, forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """Run rank 0's LM head while the other ranks compute their columns."""
    with ranks.leading(LOGITS, tensors=[input]):
        return forward(input)


def lead_sequences(
    ranks: Ranks,
    forward: Callable[..., TargetOutput],
    ids: Tensor,
    positions: Tensor,
    attention: Attention,
    *,
    aux_layers: Sequence[int] = (),
) -> TargetOutput:
    """Run rank 0's forward. Over whole sequences this makes the other ranks run theirs; for rows with KV,
    `LeadingShard.forward` has already done so.
    """
    if not isinstance(attention, CausalAttention):
        return forward(ids, positions, attention, aux_layers=aux_layers)
    starts = [] if attention.starts is None else [attention.starts]
    with ranks.leading(SEQUENCES, list(aux_layers), [ids, positions.contiguous(), *starts]):
        return forward(ids, positions, attention, aux_layers=aux_layers)


class LeadingLayers(KVLayers):
    def __init__(self, ranks: Ranks, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self._ranks = ranks

    def move(self, source: Tensor, destination: Tensor) -> None:
        with self._ranks.leading(MOVE, tensors=[source, destination]):
            super().move(source, destination)

    def copy(self, source: int, destination: int, count: int) -> None:
        with self._ranks.leading(COPY, [source, destination, count]):
            super().copy(source, destination, count)


@torch.inference_mode()
def follow(shard: Shard, ranks: Ranks) -> None:
    """On another rank: repeat rank 0's operations until it ends. Raises RankLost if it ends within an operation."""
    while (command := ranks.receive()) is not None:
        operation, numbers, tensors = command
        if operation == FREE:
            ranks.least(shard.free())
        elif operation == ALLOCATE:
            num_pages, page_size = numbers
            shard.allocate(num_pages, page_size)
        elif operation == FORWARD:
            ids, positions, *rest = tensors
            rows, aux = unpack_rows(numbers, rest)
            shard.forward(ids, positions, rows, aux)
        elif operation == LOGITS:
            shard.logits(*tensors)
        elif operation == SEQUENCES:
            ids, positions, *starts = tensors
            shard.target(ids, positions, CausalAttention(*starts), aux_layers=numbers)
        elif operation == MOVE:
            shard.kv.move(*tensors)
        else:
            assert operation == COPY
            shard.kv.copy(*numbers)


def pack_rows(rows: AttentionRows) -> tuple[list[int], list[Tensor]]:
    """Return what `unpack_rows` needs to rebuild the rows; of the page tables only the columns that any row reads."""
    table = rows.table[:, : -(-rows.longest // rows.page_size)]
    tensors = [table, rows.request, rows.committed, rows.offset]
    numbers = [rows.page_size, rows.longest, rows.first, len(rows.counts), *rows.counts]
    return numbers, tensors if rows.tree_mask is None else [*tensors, rows.tree_mask]


def unpack_rows(numbers: Sequence[int], tensors: Sequence[Tensor]) -> tuple[AttentionRows, list[int]]:
    """Rebuild the rows; return them and the numbers that followed theirs."""
    page_size, longest, first, requests, *rest = numbers
    counts, aux = tuple(rest[:requests]), rest[requests:]
    table, request, committed, offset, *tree_masks = tensors
    return AttentionRows(
        table, request, committed, offset, tree_masks[0] if tree_masks else None, page_size, longest, counts, first
    ), aux
