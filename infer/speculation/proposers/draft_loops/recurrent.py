"""Drafts with a recurrent head: a level is one forward over the nodes that are grown.

On a CPU it is one C call per level where the head's layers allow it (kernels/draft.py), which drafts the same tokens.
Nothing may look at or restrict the logits then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from infer.kvcache.tensors import KVLayers
from infer.speculation.early_exit import EarlyExit
from infer.speculation.proposers.draft_loops.base import (
    Chains,
    DraftLoop,
    LogitsAt,
    Unread,
    last_states,
    positions_from,
    rows_past,
)
from infer.speculation.tree_shapes import Children, Run, TreeShape
from kernels.draft import NativeChains, NativeDraft, NativeTrees, fuse_draft
from kernels.tree import Picked
from models.heads.base import RecurrentHead

Native = TypeVar("Native", NativeChains, NativeTrees)


class RecurrentLoop(DraftLoop):
    """`native`: the head's layers in C, and the caches of its KV; None where they run in torch."""

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
