"""A draft model with recurrent layers: their states lie beside its KV, a slot for each row of the block table.

As of a hybrid target (infer/kvcache/states.py) a draft writes no state. The state is of the tokens before the root. The
rows of a draft follow it, then each other: a level runs its recurrences over the root, the levels before and itself.
What lies before the root is then replayed into the state. So accepted tokens are read again, with the next root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infer.batch.tree import Budget, DraftTree
from infer.config import ProposerConfig
from infer.kvcache.hybrid import EVERY, Snapshots
from infer.kvcache.pool import KVPool
from infer.kvcache.states import PooledRecurrence, StateSlots, parents_of
from infer.request import Request
from infer.speculation.proposers.draft_loops.base import Unread
from infer.speculation.proposers.draft_model import DraftModelProposer, DraftModelState
from infer.speculation.proposers.head import KEPT_ROWS
from kernels.recurrence import convolve, scan
from kernels.recurrent_rows import RecurrentRows
from kernels.rows import AttentionRows
from models.attention import Attention
from models.config import RECURRENT, TargetConfig
from models.heads.draft_model.head import DraftModelHead
from models.heads.weights import dtype_of

Inputs = dict[tuple[Callable[..., Tensor], int], tuple[Tensor, ...]]  # of a kernel in a layer, `[B, n, ...]` each


@dataclass
class HybridDraftState(DraftModelState):
    """`agreed` tokens are in the state."""

    snapshot: bytes | None = None  # key of the last copy of the state, unless it stays when the next one is taken

    def prefix(self, request: Request) -> int:
        return self.agreed


class DraftStates(StateSlots):
    """The states, and the recurrences of a draft: over rows that have `states`, then over one level after another.

    roots `[B]`: rows of these that the first level follows; `before_level` replays what precedes them.
    """

    roots: Tensor
    before_level: Callable[[], object]
    last: PooledRecurrence

    def __init__(self, model: TargetConfig, slots: int, dtype: torch.dtype, pool: KVPool) -> None:
        assert model.recurrent is not None
        super().__init__(model.recurrent, model.count(RECURRENT), slots, dtype, pool.layers)
        self.snapshots = Snapshots(range(pool.null_row + 1, slots))
        self._kept: Inputs = {}  # of roots and nodes
        self._parents = torch.empty(0)  # [B, n] of these, in trees

    def attention(self, attend: Callable[[AttentionRows], Attention], rows: AttentionRows) -> Attention:
        """Return what implements models.recurrence.Recurrence too."""
        if rows.states:
            self.last, self._kept = self.over(attend(rows), rows), {}
            return self.last
        if not self._kept:
            self.before_level()
            at, last = self.roots[:, None], self.last
            self._kept = {(convolve, layer): (x[at],) for layer, (x, *_) in last.convolved.items()}
            self._kept |= {(scan, layer): tuple(x[at] for x in inputs) for layer, (*inputs, _) in last.scanned.items()}
            self._parents = torch.full(at.shape, -1, dtype=torch.int32, device=at.device)
        batch, width, parents = len(rows.counts), rows.counts[0], None
        nodes = width + next(iter(self._kept.values()))[0].shape[1]
        if rows.tree_mask is not None:
            self._parents = torch.cat([self._parents, 1 + parents_of(rows.tree_mask).unflatten(0, (batch, -1))], dim=1)
            parents = self._parents.flatten()
        slots = rows.request[::width].contiguous()
        where = RecurrentRows((nodes,) * batch, slots, torch.zeros_like(slots, dtype=torch.bool), parents)
        return LevelRecurrence(attend(rows), self, where, self._kept)


class LevelRecurrence(PooledRecurrence):
    """For the nodes of a level. Those before it, whose inputs are `kept`, are run with it."""

    def __init__(self, attention: Attention, slots: StateSlots, rows: RecurrentRows, kept: Inputs) -> None:
        super().__init__(attention, slots, rows, drafted=False)
        self._kept = kept

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
        run = partial(super().convolve, layer, weight=weight, bias=bias, silu=silu)
        return self._last_of((convolve, layer), (x,), run)

    def scan(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor, *, delta: bool) -> Tensor:
        inputs = q, k, v, decay, gain
        return self._last_of((scan, layer), inputs, partial(super().scan, layer, delta=delta))

    def _last_of(self, key: Any, inputs: tuple[Tensor, ...], run: Callable[..., Tensor]) -> Tensor:
        """Return the last rows of each request of what `run` returns for the inputs behind those that were kept."""
        batch = len(self._rows.counts)
        pairs = zip(self._kept[key], (x.unflatten(0, (batch, -1)) for x in inputs), strict=True)
        self._kept[key] = tuple(torch.cat(pair, dim=1) for pair in pairs)
        out = run(*(x.flatten(0, 1) for x in self._kept[key])).unflatten(0, (batch, -1))
        return out[:, -len(inputs[0]) // batch :].flatten(0, 1)


class HybridDraftModelProposer(DraftModelProposer):
    def __init__(self, head: DraftModelHead, config: ProposerConfig) -> None:
        super().__init__(head, config)
        self.hybrid = head.config.model

    def attach(self, pool: KVPool, first_layer: int, state_slots: int = 0) -> None:
        super().attach(pool, first_layer)
        self._states = DraftStates(self.module.config.model, state_slots, dtype_of(self.module), pool)
        assert self.loop.attend is not None
        self.loop.attend = partial(self._states.attention, self.loop.attend)

    def begin(self, request: Request) -> HybridDraftState:
        """In cached pages, begin with the last snapshot within them."""
        assert self._pool is not None
        state, size, filled = HybridDraftState(), self._pool.page_size, super().begin(request).agreed
        keys = [] if request.plain_keys is None else request.plain_keys.upto(request.tokens, filled // size)
        snapshots = self._states.snapshots
        pages = next((count for count in range(len(keys), 0, -1) if keys[count - 1] in snapshots), 0)
        if pages:
            self._states.copy_state(snapshots.find(keys[pages - 1]), request.table_row)
            state.seen, state.agreed = request.tokens[: pages * size], pages * size
        return state

    def propose(self, requests: Sequence[Request], states: Sequence[Any], budgets: Sequence[Budget]) -> DraftTree:
        """Inputs of a long text are not kept: all of it but the root is read before."""
        for request, state in zip(requests, states, strict=True):
            if request.computed - state.agreed > KEPT_ROWS:
                self.catch_up(request, state)
        return super().propose(requests, states, budgets)

    def _unread_rows(self, requests: Sequence[Request], states: Sequence[Any], depth: int = 0) -> Unread:
        for request, state in zip(requests, states, strict=True):
            if not state.agreed:
                self._states.clear_state(request.table_row)
        unread = super()._unread_rows(requests, states, depth)
        assert unread.rows is not None
        unread.rows.states = tuple((request.table_row, int(not depth)) for request in requests)
        self._states.roots, self._states.before_level = unread.ends, partial(self.was_read, requests, states)
        return unread

    def was_read(self, requests: Sequence[Request], states: Sequence[Any], *, drafting: bool = True) -> None:
        """Of a draft only what precedes the root counts, which is run again by the next one."""
        self._states.before_level = int  # does nothing, and refers to no request
        if drafting:
            pairs = zip(requests, states, strict=True)
            self._states.last.replay([range(request.computed - state.agreed) for request, state in pairs])
        super().was_read(requests, states, drafting=False)
        for request, state in zip(requests, states, strict=True):
            self._keep_snapshot(request, state)

    def _keep_snapshot(self, request: Request, state: HybridDraftState) -> None:
        """Copy the state where a page ends. Of a text the last copy is enough, and one every so many tokens."""
        assert self._pool is not None
        snapshots, (pages, rest) = self._states.snapshots, divmod(state.agreed, self._pool.page_size)
        if request.plain_keys is None or rest:
            return
        key = request.plain_keys.upto(request.tokens, pages)[-1]
        if key not in snapshots and (slot := snapshots.take()) is not None:
            self._states.copy_state(request.table_row, slot)
            snapshots.publish(key, slot)
            snapshots.forget(state.snapshot)
            state.snapshot = key if state.agreed % EVERY else None
