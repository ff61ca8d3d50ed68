"""Tensor parallelism in serving: rank 0 runs the engine, and the others repeat its operations on their target parts.

Only operations on the target's tensors are repeated: forwards, logits, and moves and copies of KV. Requests, drafts and
sampling exist on rank 0 only, and so do the layers of proposers. Forwards over whole sequences, without KV, are for
training. How a target is split, and why no bit changes: models/sharding.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.kvcache.states import HybridLayers
from infer.kvcache.tensors import KVLayers
from infer.processes.comm import Ranks
from infer.processes.target_worker import Shard
from kernels.attention import LayerShape
from kernels.rows import AttentionRows
from models.attention import Attention, CausalAttention
from models.targets.llama import LlamaTarget, TargetOutput


class LeadingShard(Shard):
    """Rank 0's part of the target; the other ranks run each of its operations on their parts at the same time."""

    def __init__(self, target: LlamaTarget, ranks: Ranks, **packing: Any) -> None:
        """`packing`: as for `Shard`."""
        super().__init__(target, **packing)
        ranks.connect()
        self.ranks, self._ranks = ranks.count, ranks
        self._make_layers = partial(LeadingLayers, ranks)
        if target.recurrent is not None:
            self._make_layers = partial(LeadingHybridLayers, ranks, target=target)
        # Patched on the LM head itself, since draft heads share that layer and call it.
        target.lm_head.forward = partial(lead_logits, ranks, target.lm_head.forward)
        target.forward = partial(lead_sequences, ranks, target.forward)
        self._end = weakref.finalize(self, ranks.close)  # also when the interpreter exits

    def free(self) -> int | None:
        with self._ranks.leading("free"):
            return self._ranks.least(super().free())

    def allocate(
        self, num_pages: int, page_size: int, others: Sequence[LayerShape] = (), state_slots: int = 0
    ) -> KVLayers:
        with self._ranks.leading("allocate", [num_pages, page_size, state_slots]):
            return super().allocate(num_pages, page_size, others, state_slots)

    def forward(self, ids: Tensor, positions: Tensor, rows: AttentionRows, aux: Sequence[int]) -> TargetOutput:
        scalars, tensors = split_rows(rows)
        with self._ranks.leading("forward", [scalars, aux], [ids, positions, *tensors]):
            return super().forward(ids, positions, rows, aux)

    def check(self) -> None:
        self._ranks.check()

    def close(self) -> None:
        self._end()


def lead_logits(ranks: Ranks, forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """Run rank 0's LM head while the other ranks compute their columns."""
    with ranks.leading("logits", tensors=[input]):
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
    with ranks.leading("sequences", aux_layers, [ids, positions.contiguous(), attention.starts]):
        return forward(ids, positions, attention, aux_layers=aux_layers)


class LeadingLayers(KVLayers):
    def __init__(self, ranks: Ranks, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self._ranks = ranks

    def move(self, source: Tensor, destination: Tensor) -> None:
        with self._ranks.leading("move", tensors=[source, destination]):
            super().move(source, destination)

    def copy(self, source: int, destination: int, count: int) -> None:
        with self._ranks.leading("copy", [source, destination, count]):
            super().copy(source, destination, count)


class LeadingHybridLayers(LeadingLayers, HybridLayers):
    """Every rank keeps its part of each state."""

    def clear_state(self, slot: int) -> None:
        with self._ranks.leading("states", ["clear_state", slot]):
            super().clear_state(slot)

    def copy_state(self, source: int, destination: int) -> None:
        with self._ranks.leading("states", ["copy_state", source, destination]):
            super().copy_state(source, destination)

    def replay(self, paths: Sequence[Sequence[int]]) -> None:
        with self._ranks.leading("states", ["replay", paths]):
            super().replay(paths)


@torch.inference_mode()
def follow(shard: Shard, ranks: Ranks) -> None:
    """On another rank: repeat rank 0's operations until it ends. Raises RankLost if a rank was lost."""
    while (command := ranks.receive()) is not None:
        match command:
            case "free", _, _:
                ranks.least(shard.free())
            case "allocate", (num_pages, page_size, state_slots), _:
                shard.allocate(num_pages, page_size, state_slots=state_slots)
            case "forward", (scalars, aux), (ids, positions, *parts):
                shard.forward(ids, positions, join_rows(scalars, parts), aux)
            case "logits", _, (hidden,):
                shard.target.lm_head(hidden)
            case "sequences", aux, (ids, positions, starts):
                shard.target(ids, positions, CausalAttention(starts), aux_layers=aux)
            case "move", _, (source, destination):
                shard.kv.move(source, destination)
            case "states", (method, *arguments), _:
                getattr(shard.kv, method)(*arguments)
            case "copy", (source, destination, count), _:
                shard.kv.copy(source, destination, count)
            case _:
                raise AssertionError(command)


def split_rows(rows: AttentionRows) -> tuple[tuple[Any, ...], list[Tensor | None]]:
    """Return scalars and tensors, of which `join_rows` makes the rows again.

    The page tables keep only the requests and columns that any row reads.
    """
    device, counts = rows.table.device, torch.tensor(rows.counts, device=rows.table.device)
    table = rows.table[rows.request[counts.cumsum(0) - 1], : -(-rows.longest // rows.page_size)]
    request = torch.arange(len(counts), device=device).repeat_interleave(counts)
    tensors = [table, request, rows.committed, rows.offset, rows.tree_mask]
    return (rows.page_size, rows.longest, rows.counts, rows.first, None, rows.states), tensors


def join_rows(scalars: Sequence[Any], tensors: Sequence[Any]) -> AttentionRows:
    """Make rows of what `split_rows` returned, after it has travelled: tuples have become lists."""
    fixed = [tuple(value) if isinstance(value, list) else value for value in scalars]
    return AttentionRows(*tensors, *fixed)
