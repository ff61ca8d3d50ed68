"""A target divided among ranks: rank 0 leads an engine as if it were alone, the others do to their part what it does.

Only what touches the target's tensors is shared: forwards, logits, and moves and copies of KV. Requests, drafts and
choices are rank 0's; proposers keep their layers there. Forwards over whole sequences, without KV, are training's. How
a target is divided, and why no bit changes: models/parallel.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.kvcache.tensors import KVLayers, LayerShape
from infer.parallel.comm import STOP, Ranks
from infer.parallel.target_worker import Shard
from kernels.linear import WeightFormat
from kernels.rows import AttentionRows
from models.attention import Attention, CausalAttention
from models.targets.llama import LlamaTarget, TargetOutput

FREE, ALLOCATE, FORWARD, LOGITS, MOVE, COPY, SEQUENCES = range(7)


class LeadingShard(Shard):
    """Rank 0's part of the target; whatever is done to it the other ranks do to theirs at the same time."""

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
        # Not here but in the layer itself: heads borrow it and call it.
        target.lm_head.forward = partial(lead_logits, ranks, target.lm_head.forward)
        target.forward = partial(lead_sequences, ranks, target.forward)
        self._end = weakref.finalize(self, ranks.close)  # also when the interpreter ends

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


def lead_logits(ranks: Ranks, own: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """Rank 0's LM head: the others compute their columns too."""
    with ranks.leading(LOGITS, tensors=[input]):
        return own(input)


def lead_sequences(
    ranks: Ranks,
    own: Callable[..., TargetOutput],
    ids: Tensor,
    positions: Tensor,
    attention: Attention,
    *,
    aux_layers: Sequence[int] = (),
) -> TargetOutput:
    """Rank 0's forward: over whole sequences the others go along; over rows with KV they do already."""
    if not isinstance(attention, CausalAttention):
        return own(ids, positions, attention, aux_layers=aux_layers)
    starts = [] if attention.starts is None else [attention.starts]
    with ranks.leading(SEQUENCES, list(aux_layers), [ids, positions.contiguous(), *starts]):
        return own(ids, positions, attention, aux_layers=aux_layers)


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
    """On another rank: does what rank 0 does until it says stop. Raises RankLost if it ends otherwise."""
    while True:
        operation, numbers, tensors = ranks.receive()
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
        elif operation == COPY:
            shard.kv.copy(*numbers)
        else:
            assert operation == STOP
            return


def pack_rows(rows: AttentionRows) -> tuple[list[int], list[Tensor]]:
    """What `unpack_rows` needs to make them again; of the tables the part that any row looks at."""
    table = rows.table[:, : -(-rows.longest // rows.page_size)]
    tensors = [table, rows.request, rows.committed, rows.offset]
    numbers = [rows.page_size, rows.longest, rows.first, len(rows.counts), *rows.counts]
    return numbers, tensors if rows.words is None else [*tensors, rows.words]


def unpack_rows(numbers: Sequence[int], tensors: Sequence[Tensor]) -> tuple[AttentionRows, list[int]]:
    """The rows, and the numbers that came after theirs."""
    page_size, longest, first, requests, *rest = numbers
    counts, aux = tuple(rest[:requests]), rest[requests:]
    table, request, committed, offset, *words = tensors
    return AttentionRows(
        table, request, committed, offset, words[0] if words else None, page_size, longest, counts, first
    ), aux
