"""The states of a hybrid target's recurrent layers, beside the KV of its attention layers.

A running request's states lie in the slot of its row of the block table, and copies for the prefix cache in further
slots (infer/kvcache/hybrid.py). A verify writes none of them: it keeps its rows' inputs, over which `replay` runs the
same kernels along the accepted paths. So a rejected token has never been in a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.config import EngineConfig
from infer.kvcache.tensors import KVLayers, PooledDecoding
from kernels.decoder import NativeDecoder
from kernels.recurrence import convolve, scan
from kernels.recurrent_parts import Kept, RecurrentWeights, States
from kernels.recurrent_rows import RecurrentRows
from kernels.rows import AttentionRows, set_bit_positions
from models.attention import Attention
from models.config import RECURRENT, RecurrentConfig, TargetConfig
from models.mixers.sharding import part_of
from models.targets.llama import LlamaTarget

SNAPSHOT_BYTES, MOST_SNAPSHOTS = 2**28, 16  # of all copies of states; for each request at most


class StateSlots:
    """The states of a model's recurrent layers. S slots: of requests and copies; the one of the null row is among them.

    windows `[L, S, K - 1, C]`: the last inputs of L convolutions; states `[L, S, H, K, V]` fp32, if there are any.
    """

    def __init__(self, config: RecurrentConfig, count: int, slots: int, dtype: torch.dtype, layers: KVLayers) -> None:
        columns = count, slots, config.taps - 1, config.channels
        matrices = count, slots, config.heads, config.key_size, config.value_size
        self.windows = layers.zeros(*columns, dtype=dtype)
        self.states = layers.zeros(*matrices, dtype=torch.float32) if config.heads else None

    def clear_state(self, slot: int) -> None:
        """Fill a slot with the state before a text."""
        for tensor in self._tensors:
            tensor[:, slot] = 0

    def copy_state(self, source: int, destination: int) -> None:
        for tensor in self._tensors:
            tensor[:, destination] = tensor[:, source]

    def over(self, attention: Any, rows: AttentionRows, make: type[PooledRecurrence] | None = None) -> PooledRecurrence:
        """Return the recurrence over these rows, of which `rows.states` says where they begin."""
        drafted = not all(certain for _, certain in rows.states)
        return (make or PooledRecurrence)(attention, self, recurrent_rows(rows), drafted)

    @property
    def _tensors(self) -> list[Tensor]:
        return [self.windows] if self.states is None else [self.windows, self.states]


class HybridLayers(KVLayers, StateSlots):
    """KV and states of a hybrid target."""

    def __init__(self, *args: Any, target: LlamaTarget, state_slots: int, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        assert target.recurrent is not None
        StateSlots.__init__(self, target.recurrent, target.config.count(RECURRENT), state_slots, self._dtype, self)
        self.last_states: Sequence[tuple[int, int]] = ()  # of the last forward's rows (kernels.rows.AttentionRows)
        self._last: PooledRecurrence | None = None

    def free(self) -> None:
        super().free()
        self.windows, self.states, self._last = torch.empty(0), None, None

    def attention(self, rows: AttentionRows, num_heads: int, *, first_layer: int = 0) -> Any:
        """As of KVLayers; what the target's layers get implements models.recurrence.Recurrence too."""
        attention = super().attention(rows, num_heads, first_layer=first_layer)
        if first_layer:
            return attention
        make = FusedRecurrence if isinstance(attention, PooledDecoding) else PooledRecurrence
        self.last_states, self._last = rows.states, self.over(attention, rows, make)
        return self._last

    def replay(self, paths: Sequence[Sequence[int]]) -> None:
        """Bring the states up to date with the last forward's rows `paths[b]`, node by node, of each of its requests.

        Called again, the paths go on where they ended.
        """
        assert self._last is not None
        self._last.replay(paths)


class PooledRecurrence:
    """Attention over the pool, and models.recurrence.Recurrence over its states, for the rows of one forward.

    Inputs are kept for `replay` only if some rows are `drafted`: those of prompts would take memory for nothing.
    """

    def __init__(self, attention: Attention, slots: StateSlots, rows: RecurrentRows, drafted: bool) -> None:
        self._attention, self._windows, self._states = attention, slots.windows, slots.states
        self._rows, self._drafted = rows, drafted
        self.convolved: dict[int, tuple[Any, ...]] = {}  # what each layer's convolution read
        self.scanned: dict[int, tuple[Any, ...]] = {}  # and its linear recurrence
        if (project := getattr(attention, "project", None)) is not None:
            self.project = project

    def __call__(self, *args: Any, **scoring: Any) -> Tensor:
        return self._attention(*args, **scoring)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
        if self._drafted:
            self.convolved[layer] = x, weight, bias
        return convolve(x, weight, bias, self._windows[layer], self._rows, silu=silu)

    def scan(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor, *, delta: bool) -> Tensor:
        assert self._states is not None
        if self._drafted:
            self.scanned[layer] = q, k, v, decay, gain, delta
        return scan(q, k, v, decay, gain, self._states[layer], self._rows, delta=delta)

    def replay(self, paths: Sequence[Sequence[int]]) -> None:
        if not any(map(len, paths)):
            return
        index, rows = self._rows.along(paths)
        for layer, (x, weight, bias) in self.convolved.items():
            convolve(x[index], weight, bias, self._windows[layer], rows, silu=False)
        for layer, (*inputs, delta) in self.scanned.items():
            assert self._states is not None
            q, k, v, decay, gain = (x[index] for x in inputs)
            scan(q, k, v, decay, gain, self._states[layer], rows, delta=delta)


class FusedRecurrence(PooledRecurrence):
    """Of layers that a fused decoder runs."""

    _attention: PooledDecoding
    _fused: tuple[RecurrentWeights, Kept] | None = None  # what its layers read

    def decode(
        self, decoder: NativeDecoder, x: Tensor, rotary: tuple[Tensor, Tensor], entering: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As models.attention.Decode."""
        assert decoder.recurrent is not None
        states = States(self._rows, self._windows, self._states)
        kept = decoder.recurrent.buffers(len(x), states, keep=self._drafted)
        self._fused = (decoder.recurrent, kept) if self._drafted else None
        begin = partial(decoder.recurrent.begin, states=states, kept=kept)
        return self._attention.decode(decoder, x, rotary, entering, states=begin)

    def replay(self, paths: Sequence[Sequence[int]]) -> None:
        if self._fused is None or not any(map(len, paths)):
            return super().replay(paths)
        (index, rows), (weights, kept) = self._rows.along(paths), self._fused
        weights.replay(States(rows, self._windows, self._states), kept.rows(index))


def recurrent_rows(rows: AttentionRows) -> RecurrentRows:
    """Return how rows follow each other and their requests' states, from what the pool says of them and their trees."""
    device = rows.request.device
    slots, certain = torch.tensor(rows.states).T.to(device)
    parents = None if rows.tree_mask is None else parents_of(rows.tree_mask)
    return RecurrentRows(rows.counts, slots.contiguous(), certain.bool(), parents)


def parents_of(tree_mask: Tensor) -> Tensor:
    """Return the last ancestor of each node but itself, -1 if there is none: int32 `[R]`."""
    nth, count = set_bit_positions(tree_mask)
    return torch.where(count > 1, nth.gather(1, (count - 2).clamp(min=0)[:, None])[:, 0], -1).int()


class StatePlan(NamedTuple):
    slots: int = 0  # of the target: one of each request, one of the null row, and of snapshots
    bytes: int = 0  # of these, and of a draft model's
    draft_slots: int = 0

    def __str__(self) -> str:
        """Return what a message about memory adds."""
        slots = self.slots + self.draft_slots
        return f", the {slots} states for engine.max_batch {self.bytes / 2**20:.0f} MiB" if slots else ""


NO_STATES = StatePlan()


def plan_states(config: EngineConfig, models: Sequence[TargetConfig], dtype: torch.dtype) -> StatePlan:
    """Return how many states of each of `models` that is a hybrid are kept, and a rank's bytes of them.

    Snapshots are as many as SNAPSHOT_BYTES hold, at least one for each second request.
    """
    ranks = config.tensor_parallel, *(1 for _ in models[1:])
    (slots, used), *drafts = (_slots_of(config, *each, dtype) for each in zip(models, ranks, strict=True))
    return StatePlan(slots, used + sum(size for _, size in drafts), sum(count for count, _ in drafts))


def _slots_of(config: EngineConfig, model: TargetConfig, ranks: int, dtype: torch.dtype) -> tuple[int, int]:
    if model.recurrent is None:
        return 0, 0
    each = part_of(model.recurrent, ranks).bytes(dtype.itemsize) * model.count(RECURRENT)
    snapshots = max(config.max_batch // 2, min(MOST_SNAPSHOTS * config.max_batch, SNAPSHOT_BYTES // each), 1)
    slots = config.max_batch + 1 + snapshots
    return slots, slots * each
