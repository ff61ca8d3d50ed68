"""Draft loops: what a model drafts chains and trees with, one for each kind of head; here that of recurrent heads.

Each drafts in torch, on any device, and where it can in C, behind one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from infer.batch.tree import MAX_NODES
from infer.kvcache.tensors import KVLayers
from infer.speculation.proposers.draft_loops.early_exit import EarlyExit
from infer.speculation.proposers.draft_loops.tree_shapes import Children, Run, TreeShape, grow
from kernels.choose import choose, choose_best
from kernels.draft import NativeChains, NativeDraft, NativeTrees, fuse_draft
from kernels.operands import Candidates, ChoiceParameters, Picked
from kernels.rows import AttentionRows
from models.attention import Attention, no_attention
from models.heads.base import Head, MaskHead, RecurrentHead

Native = TypeVar("Native", NativeChains, NativeTrees)


class Unread(NamedTuple):
    """What a head has not read yet of B requests: R rows, grouped by request.

    A row is a slot of the head: a token and the features of the position before it. Rows after a request's last slot,
    which holds the root, are spare: the rows of a mask head's further depths, or padding. Spare rows write their KV
    after that of the slots, where it is overwritten in order before a row attends to it.
    """

    ids: Tensor  # [R]
    features: Tensor  # [R, F]
    slots: Tensor  # [R] rotary positions
    rows: AttentionRows | None  # their addresses, from each request's base on; None for a head without KV
    ends: Tensor  # [B] index of the row that holds the root
    root: Tensor  # [B] the root's position
    base: Tensor  # [B] the head's KV begins at this place, a multiple of the page size
    requests: Tensor  # [B] the requests' rows of the table of `rows`
    parameters: ChoiceParameters | None  # [B]


class Chains(NamedTuple):
    """Drafted chains: the first `length[b]` target ids of each row count."""

    token: Tensor  # [B, D]
    length: Tensor  # [B]
    log_probs: Tensor | None = None  # [B, D] of the tokens, under the noise that they were chosen with, if scored


# (level, tokens [B] of each level before) -> logits [B, Vd], and the head's log-probability [B] that the token drafted
# from them is accepted, if it predicts one
LogitsAt = Callable[[int, Sequence[Tensor]], tuple[Tensor, Tensor | None]]
Adjust = Callable[[Tensor, Sequence[Tensor]], Tensor]  # (logits [B, Vd], tokens [B] of each level before) -> logits


class DraftLoop(ABC):
    """Drafts with a head. The host does not wait for results unless `early_exit` or `adjust` does, so a CUDA graph can
    capture a draft.
    """

    one_forward: ClassVar[bool] = False  # all levels are drafted in any case

    def __init__(self, head: Head) -> None:
        self._head, self.draft_ids = head, head.target_ids
        self.attend: Callable[[AttentionRows], Attention] | None = None  # in the head's layers; None without KV

    def attach(self, layers: KVLayers, first_layer: int) -> None:
        """Keep the head's KV in these layers of the pool, from `first_layer` on."""
        if (shape := self._head.config.attention) is not None:
            self.attend = partial(layers.attention, num_heads=shape.num_heads, first_layer=first_layer)

    def refresh(self) -> None:  # noqa: B027 - most loops keep nothing of the weights
        """Take note that the head's weights were overwritten."""

    def spare_rows(self, deepest: int) -> int:
        """Return how many spare rows a request needs for drafts of this depth."""
        return 0

    @abstractmethod
    def places(self, depth: int, shape: TreeShape | None) -> int:
        """Return to how many places past the root's a draft of this depth writes KV."""

    def choices(self, candidates: int) -> int:
        """Return from how many tokens a depth is drafted. `candidates`: that a corrector chooses among by default."""
        return len(self.draft_ids)

    @abstractmethod
    def read(self, unread: Unread) -> None:
        """Write the KV of the unread rows."""

    def chain(
        self,
        unread: Unread,
        depths: Tensor,
        deepest: int,
        early_exit: EarlyExit | None = None,
        adjust: Adjust | None = None,
    ) -> Chains:
        """Draft chains of up to `depths` `[B]` tokens each, `deepest` being the greatest depth.

        `adjust` may change the logits that a level chooses from.
        """
        drafted = self._all_levels(unread, depths, deepest, early_exit) if adjust is None else None
        return drafted or self._by_level(unread, depths, deepest, early_exit, adjust)

    def tree(self, unread: Unread, shape: TreeShape, deepest: int) -> Candidates:
        """Grow trees of this shape down to the depth `deepest`."""
        return grow(shape, deepest, unread.root, *self._growing(unread, shape, deepest))

    def choice(self, logits: Tensor, positions: Tensor, parameters: ChoiceParameters | None) -> Tensor:
        """Return the head's choice `[R]` (target ids), under the noise of the target's choice at the same position."""
        return choose(logits, parameters, positions, self.draft_ids)

    def best(
        self, logits: Tensor, positions: Tensor, parameters: ChoiceParameters | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return each row's `count` best target ids under the same noise, `[R, count]`, and their log-probabilities."""
        return choose_best(logits, parameters, positions, self.draft_ids, min(count, logits.shape[1]))

    @abstractmethod
    def _all_levels(self, unread: Unread, depths: Tensor, deepest: int, early_exit: EarlyExit | None) -> Chains | None:
        """Draft chains by a quicker way than level by level; None if there is none."""

    def _by_level(
        self, unread: Unread, depths: Tensor, deepest: int, early_exit: EarlyExit | None, adjust: Adjust | None
    ) -> Chains:
        positions = positions_from(unread.root, deepest)  # slot i drafts what the target chooses at position i + 1
        logits_at, drafted, scores = self._logits(unread, positions), list[Tensor](), list[Tensor]()
        for level in range(deepest):
            logits, confidence = logits_at(level, drafted)
            if adjust is not None:
                logits = adjust(logits, drafted)
            if early_exit is None:
                drafted.append(self.choice(logits, positions[level], unread.parameters))
                continue
            token, log_probs = self.best(logits, positions[level], unread.parameters, 1)
            drafted.append(token[:, 0])
            scores.append(log_probs[:, 0] if confidence is None else confidence)
            if not early_exit.after(level, scores[-1]):
                break
        length = depths.clamp(max=deepest) if early_exit is None else early_exit.lengths
        return Chains(torch.stack(drafted, dim=1), length, torch.stack(scores, dim=1) if scores else None)

    @abstractmethod
    def _logits(self, unread: Unread, positions: Tensor) -> LogitsAt:
        """Return what gives the logits of each level of a chain, at positions `[levels, B]`."""

    @abstractmethod
    def _growing(self, unread: Unread, shape: TreeShape, deepest: int) -> tuple[Children, Run]:
        """Return the callbacks of `grow`."""

    def fused(self, features: Tensor) -> Tensor:
        """Return the states `[R, S]` that depth 0 of the head reads, from the features of all aux layers `[R, F]`."""
        return self._head.fuse(features.chunk(len(self._head.config.aux_layers), dim=-1))

    def attention(self, rows: AttentionRows | None) -> Attention:
        """Return the attention of these rows in the head's layers."""
        return no_attention if self.attend is None or rows is None else self.attend(rows)


def last_states(loop: DraftLoop, head: RecurrentHead | MaskHead, unread: Unread) -> Tensor:
    """Run the head over the unread rows; return the state of each request's last slot `[B, S]`."""
    ends = unread.ends
    if unread.rows is None:  # without KV only the last slot matters
        ids, slots, features = unread.ids[ends], unread.slots[ends], unread.features[ends]
        return head.step(ids, loop.fused(features), slots, no_attention, 0)
    state = loop.fused(unread.features)
    return head.step(unread.ids, state, unread.slots, loop.attention(unread.rows), 0)[ends]


def rows_past(
    unread: Unread, start: Tensor, width: int, *, shift: int, offset: int = 0, tree_mask: Tensor | None = None
) -> AttentionRows | None:
    """Address `width` nodes of each request past its unread rows; arguments as for AttentionRows.grid."""
    rows = unread.rows
    if rows is None:
        return None
    where = {"shift": shift, "offset": offset, "tree_mask": tree_mask, "first": rows.first}
    longest = rows.longest + (shift + width - 1 if tree_mask is None else MAX_NODES)
    sizes = {"page_size": rows.page_size, "longest": longest}
    return AttentionRows.grid(rows.table, unread.requests, start, width, **sizes, **where)


def positions_from(root: Tensor, count: int) -> Tensor:
    """root `[B]` -> root, root + 1, ... `[count, B]`, rows that begin at multiples of 16 bytes."""
    batch, steps = len(root), torch.arange(count, device=root.device)
    return torch.add(root, steps[:, None], out=root.new_empty(count, batch + batch % 2)[:, :batch])


class RecurrentLoop(DraftLoop):
    """A level is one forward over the nodes that are grown, on a CPU one C call where the head's layers allow it.

    `native`: the head's layers in C (kernels/draft.py), and the caches of its KV; None where they run in torch. Both
    draft the same tokens; in C nothing may look at or restrict the logits.
    """

    _head: RecurrentHead

    def __init__(self, head: RecurrentHead) -> None:
        super().__init__(head)
        self.native: tuple[NativeDraft, Sequence[Tensor]] | None = None

    def attach(self, layers: KVLayers, first_layer: int) -> None:
        super().attach(layers, first_layer)
        parts, shape = self._head.draft_parts(), self._head.config.attention
        caches = layers.caches[first_layer : first_layer + (0 if shape is None else shape.layers)]
        fits = parts is not None and all(cache.dtype is parts.decoder.dtype for cache in caches)
        native = fuse_draft(parts) if parts is not None and fits else None
        self.native = None if native is None else (native, caches)

    def places(self, depth: int, shape: TreeShape | None) -> int:
        return depth - 1 if shape is None else shape.rows

    def read(self, unread: Unread) -> None:
        if (levels := self._begin(NativeChains, unread, 0)) is None:
            last_states(self, self._head, unread)
        else:
            levels.read()

    def _all_levels(self, unread: Unread, depths: Tensor, deepest: int, early_exit: EarlyExit | None) -> Chains | None:
        levels = self._begin(NativeChains, unread, deepest)
        return None if levels is None else native_chain(levels, depths, early_exit)

    def _begin(self, kind: type[Native], unread: Unread, deepest: int, **limits: int) -> Native | None:
        """Begin a draft in C with all unread rows, none of them spare; None where the head's operations draft."""
        if self.native is None or (unread.parameters is not None and unread.parameters.restricts):
            return None
        (native, caches), state = self.native, self.fused(unread.features)
        assert unread.rows is not None
        assert int(unread.root.max()) + 1 + deepest <= len(native.parts.rotary[0])
        rows = unread.ids, state, unread.slots, unread.rows
        return kind(native, *rows, caches, unread.parameters, deepest, **limits)

    def _logits(self, unread: Unread, positions: Tensor) -> LogitsAt:
        state, after_root = last_states(self, self._head, unread), unread.root - unread.base

        def logits_at(level: int, drafted: Sequence[Tensor]) -> tuple[Tensor, None]:
            nonlocal state
            if level:
                attention = self.attention(rows_past(unread, after_root, 1, shift=level))
                state = self._head.step(drafted[-1], state, positions[level - 1], attention, level)
            return self._head.logits(state, level), None

        return logits_at

    def _growing(self, unread: Unread, shape: TreeShape, deepest: int) -> tuple[Children, Run]:
        """Each node attends to its own ancestors."""
        count = max(map(shape.fan_out, range(1, deepest + 1)))
        trees = self._begin(NativeTrees, unread, deepest, width=shape.width, count=count, places=shape.rows)
        if trees is not None:
            return trees.children, lambda level, picked: trees.run(level, picked.parent, picked.token)
        after_root, positions = unread.root - unread.base, positions_from(unread.root, deepest)
        state, ran = last_states(self, self._head, unread)[:, None], 0  # [B, M, S] of the nodes a level is grown from

        def children(level: int, fan_out: int) -> tuple[Tensor, Tensor]:
            width, parameters = state.shape[1], unread.parameters
            logits, at = self._head.logits(state.flatten(0, 1), level - 1), positions[level - 1]
            parameters = parameters and parameters.repeated(width)
            tokens, values = self.best(logits, at.repeat_interleave(width), parameters, fan_out)
            return tokens.unflatten(0, (-1, width)), values.unflatten(0, (-1, width))

        def run(level: int, picked: Picked) -> None:
            nonlocal state, ran
            width, tree_mask = picked.parent.shape[1], picked.frontier.tree_mask
            above = state.gather(1, picked.parent[..., None].expand(-1, -1, state.shape[-1])).flatten(0, 1)
            rows = rows_past(unread, after_root, width, shift=1, offset=ran, tree_mask=tree_mask)
            slots = positions[level - 1].repeat_interleave(width)
            stepped = self._head.step(picked.token.flatten(), above, slots, self.attention(rows), level)
            state, ran = stepped.unflatten(0, (-1, width)), ran + width

        return children, run


def native_chain(levels: NativeChains, depths: Tensor, early_exit: EarlyExit | None) -> Chains:
    """Draft chains of up to `depths` `[B]` tokens each. Those that end leave the batch."""
    limits, active = depths.tolist(), list(range(len(depths)))
    drafts, scores = ([[zero] * max(limits) for _ in limits] for zero in (0, 0.0))
    for level in range(max(limits)):
        tokens, log_probs = levels.draft(return_log_probs=early_exit is not None)
        for place, row in enumerate(active):
            drafts[row][level] = tokens[place]
            scores[row][level] = 0.0 if log_probs is None else log_probs[place]
        going = [limit > level + 1 for limit in limits]
        if early_exit is not None:
            early_exit.after(level, [row[level] for row in scores])
            going = early_exit.chains.active
        places = [place for place, row in enumerate(active) if going[row]]
        if not places:
            break
        if len(places) < len(active):
            levels.keep(places)
            active = [active[place] for place in places]
    length = depths if early_exit is None else early_exit.lengths
    token, width = torch.tensor(drafts), int(length.max())
    return Chains(token[:, :width], length, None if early_exit is None else torch.tensor(scores)[:, :width])
