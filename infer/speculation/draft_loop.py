"""Drafts with a head: chains and trees, level by level, by the head's own operations or by one C call per level.

Both loops draft the same tokens. A level of a recurrent head is one forward over the nodes that are grown. A parallel
head has the logits of all depths after the first forward: Medusa from the target's state alone, P-EAGLE from one mask
slot per further depth, in rows that follow the committed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.speculation.early_exit import EarlyExit, HostExit
from infer.speculation.tree import MAX_NODES
from infer.speculation.tree_shapes import Children, Grown, Run, TreeShape, grow
from kernels.choose import ChoiceParameters, choose, choose_best
from kernels.draft import NativeChains, NativeDraft, NativeTrees
from kernels.rows import AttentionRows
from models.attention import Attention, no_attention
from models.heads.base import Head


class Unread(NamedTuple):
    """What a head has not read yet of B requests: R rows, grouped by request.

    A row is a slot of the head: a token and the features of the position before it. Rows after a request's last slot,
    which holds the root, are spare: the mask slots of a parallel head, or padding. Spare rows write their KV after that
    of the slots, where it is overwritten in order before a row attends to it.
    """

    ids: Tensor  # [R]
    features: Tensor  # [R, F]
    slots: Tensor  # [R] rotary positions
    rows: AttentionRows | None  # their addresses, from each request's base on; None for a head without KV
    ends: Tensor  # [B] index of the row that holds the root
    root: Tensor  # [B] the root's position
    base: Tensor  # [B] the head's KV begins at this place, a multiple of the page size
    parameters: ChoiceParameters | None  # [B]


class Chains(NamedTuple):
    """Drafted chains: the first `length[b]` target ids of each row count."""

    token: Tensor  # [B, D]
    length: Tensor  # [B]
    log_probs: Tensor | None = None  # [B, D] of the tokens, under the noise that they were chosen with, if scored


Adjust = Callable[[Tensor, Sequence[Tensor]], Tensor]  # (logits [B, Vd], tokens [B] of each level before) -> logits


def fused(head: Head, features: Tensor) -> Tensor:
    """Return the states `[R, S]` that depth 0 of the head reads, from the features of all aux layers `[R, F]`."""
    return head.fuse(features.chunk(len(head.config.aux_layers), dim=-1))


class TorchLoop:
    """Drafts by the head's own operations, on any device.

    The host does not wait for results unless `early_exit` or `adjust` does, so a CUDA graph can capture a draft.
    `attend` makes the attention of rows in the head's KV layers; None for a head without KV.
    """

    def __init__(self, head: Head, attend: Callable[[AttentionRows], Attention] | None) -> None:
        self._head, self._attend, self.draft_ids = head, attend, head.target_ids
        with torch.no_grad():
            self._mask_slot = head.mask_slot()

    def spare_rows(self, deepest: int) -> int:
        """Return how many spare rows a request needs for drafts of this depth."""
        return 0 if self._mask_slot is None else deepest - 1

    def read(self, unread: Unread) -> Tensor:
        """Run the head over the unread rows; return the state of each request's last slot `[B, S]`."""
        ends = unread.ends
        if unread.rows is None:  # without KV only the last slot matters
            return self._step(unread.ids[ends], fused(self._head, unread.features[ends]), unread.slots[ends], None, 0)
        return self._step(unread.ids, fused(self._head, unread.features), unread.slots, unread.rows, 0)[ends]

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
        logits_at = self._parallel(unread, deepest) if self._head.parallel else self._recurrent(unread)
        active, length = depths > 0, torch.zeros_like(depths)
        drafted, scores = list[Tensor](), list[Tensor]()
        for level in range(deepest):
            logits = logits_at(level, drafted)
            if adjust is not None:
                logits = adjust(logits, drafted)
            positions = unread.root + level  # slot i drafts the token that the target chooses at position i + 1
            kept, continuing = active, active & (depths > level + 1)
            if early_exit is None:
                drafted.append(self.choice(logits, positions, unread.parameters))
            else:
                token, log_probs = self.best(logits, positions, unread.parameters, 1)
                drafted.append(token[:, 0])
                scores.append(log_probs[:, 0])
                worth_row, worth_level = early_exit(level, scores[-1], active)
                kept, continuing = kept & worth_row, continuing & worth_level
            length, active = length + kept, continuing
            if early_exit is not None and early_exit.on_host and not bool(active.any()):
                break
        return Chains(torch.stack(drafted, dim=1), length, torch.stack(scores, dim=1) if scores else None)

    def tree(self, unread: Unread, shape: TreeShape, deepest: int) -> Grown:
        """Grow trees of this shape down to the depth `deepest`."""
        grown = self._growing_parallel if self._head.parallel else self._growing
        return grow(shape, deepest, unread.root, *grown(unread, deepest))

    def choice(self, logits: Tensor, positions: Tensor, parameters: ChoiceParameters | None) -> Tensor:
        """Return the head's choice `[R]` (target ids), under the noise of the target's choice at the same position."""
        return self.draft_ids[choose(logits, parameters, positions, self.draft_ids)]

    def best(
        self, logits: Tensor, positions: Tensor, parameters: ChoiceParameters | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return each row's `count` best target ids under the same noise, `[R, count]`, and their log-probabilities."""
        count = min(count, logits.shape[1])
        columns, values = choose_best(logits, parameters, positions, self.draft_ids, count)
        return self.draft_ids[columns], values

    def _step(self, ids: Tensor, state: Tensor, slots: Tensor, rows: AttentionRows | None, depth: int) -> Tensor:
        attention = no_attention if self._attend is None or rows is None else self._attend(rows)
        return self._head.step(ids, state, slots, attention, depth)

    # ---- the logits of each level of a chain ----------------------------------------------------------------------

    def _recurrent(self, unread: Unread) -> Callable[[int, Sequence[Tensor]], Tensor]:
        state, rows = self.read(unread), None

        def logits_at(level: int, drafted: Sequence[Tensor]) -> Tensor:
            nonlocal state, rows
            if level:
                rows = rows.next() if rows is not None else self._after_root(unread, torch.zeros_like(unread.root[:1]))
                state = self._step(drafted[-1], state, unread.root + level - 1, rows, level)
            return self._head.logits(state, level)

        return logits_at

    def _parallel(self, unread: Unread, deepest: int) -> Callable[[int, Sequence[Tensor]], Tensor]:
        logits = self._all_logits(unread, deepest)
        return lambda level, _: logits[:, level]

    def _all_logits(self, unread: Unread, deepest: int) -> Tensor:
        """Return a parallel head's logits `[B, deepest, Vd]`."""
        if self._mask_slot is None:
            return self._head.all_logits(self.read(unread), deepest)
        assert unread.rows is not None
        mask_id, mask_state = self._mask_slot
        spare = torch.arange(len(unread.ids), device=unread.ids.device) > unread.ends[unread.rows.request]
        state = torch.where(spare[:, None], mask_state, fused(self._head, unread.features))
        states = self._step(unread.ids.masked_fill(spare, mask_id), state, unread.slots, unread.rows, 0)
        index = unread.ends[:, None] + torch.arange(deepest, device=unread.ids.device)
        return self._head.logits(states[index.flatten()], 0).unflatten(0, index.shape)  # all depths share one LM head

    def _after_root(self, unread: Unread, offset: Tensor, tree_mask: Tensor | None = None) -> AttentionRows | None:
        """Address nodes of each request at `offset` `[N]` from the place after the root's slot; tree_mask `[B, N]`."""
        rows = unread.rows
        if rows is None:
            return None
        return AttentionRows.grid(
            rows.table,
            unread.root + 1 - unread.base,
            offset,
            page_size=rows.page_size,
            longest=rows.longest + (1 if tree_mask is None else MAX_NODES),
            tree_mask=tree_mask,
            first=rows.first,
        )

    # ---- callbacks of `grow` --------------------------------------------------------------------------------------

    def _growing(self, unread: Unread, deepest: int) -> tuple[Children, Run]:
        """Each node attends to its own ancestors."""
        start, batch, device = unread.root[:, None], len(unread.root), unread.root.device
        state = self.read(unread)[:, None]  # [B, M, S] of the nodes that a level is grown from
        tree_mask = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # [B, M]
        run_before = 0

        def children(level: int, fan_out: int) -> tuple[Tensor, Tensor]:
            width = state.shape[1]
            owner = torch.arange(batch, device=device).repeat_interleave(width)
            positions = (start + level - 1).expand(-1, width).flatten()
            logits = self._head.logits(state.flatten(0, 1), level - 1)
            parameters = unread.parameters and unread.parameters.rows(owner)
            tokens, values = self.best(logits, positions, parameters, fan_out)
            return tokens.unflatten(0, (batch, width)), values.unflatten(0, (batch, width))

        def run(level: int, parent: Tensor, token: Tensor) -> None:
            nonlocal state, tree_mask, run_before
            above = state.gather(1, parent[..., None].expand(-1, -1, state.shape[-1])).flatten(0, 1)
            slots = (start + level - 1).expand_as(parent).flatten()
            offset = run_before + torch.arange(parent.shape[1], device=device)
            tree_mask = tree_mask.gather(1, parent) | (torch.ones((), dtype=torch.int64, device=device) << offset)
            run_before += parent.shape[1]
            rows = self._after_root(unread, offset, tree_mask)
            state = self._step(token.flatten(), above, slots, rows, level).unflatten(0, parent.shape)

        return children, run

    def _growing_parallel(self, unread: Unread, deepest: int) -> tuple[Children, Run]:
        """All nodes of a level have the same children, whatever was drafted before."""
        logits = self._all_logits(unread, deepest)

        def children(level: int, fan_out: int) -> tuple[Tensor, Tensor]:
            tokens, values = self.best(logits[:, level - 1], unread.root + level - 1, unread.parameters, fan_out)
            return tokens[:, None], values[:, None]

        return children, lambda level, parent, token: None


class NativeLoop:
    """Does the same by one C call per level (kernels/draft.py). Chains that end leave the batch.

    Nothing may be restricted. `caches`: of the head's KV layers.
    """

    def __init__(self, head: Head, native: NativeDraft, caches: Sequence[Tensor]) -> None:
        self._head, self._native, self._caches = head, native, caches

    def read(self, unread: Unread) -> None:
        NativeChains(self._native, *self._inputs(unread, 0), self._caches, None, 0).read()

    def chain(self, unread: Unread, depths: Tensor, deepest: int, early_exit: HostExit | None = None) -> Chains:
        levels = NativeChains(self._native, *self._inputs(unread, deepest), self._caches, unread.parameters, deepest)
        drafts: list[list[int]] = [[] for _ in depths]
        limits, active = depths.tolist(), list(range(len(depths)))
        scores: list[list[float]] = [[] for _ in depths]  # log-probabilities of the drafts
        for level in range(deepest):
            tokens, values = levels.draft(return_log_probs=early_exit is not None)
            kept = going = [True] * len(active)
            if early_exit is not None and values is not None:
                kept, going = early_exit.decide(level, values, active)
                for row, value in zip(active, values, strict=True):
                    scores[row].append(value)
            for row, token, keep in zip(active, tokens, kept, strict=True):
                drafts[row] += [token] if keep else []
            places = [place for place, row in enumerate(active) if going[place] and limits[row] > level + 1]
            if not places:
                break
            if len(places) < len(active):
                levels.keep(places)
                active = [active[place] for place in places]
        width = max(map(len, drafts))
        token = torch.tensor([draft + [0] * (width - len(draft)) for draft in drafts])
        log_probs = torch.tensor([row[:width] + [0.0] * (width - len(row)) for row in scores])
        return Chains(token, torch.tensor([len(draft) for draft in drafts]), None if early_exit is None else log_probs)

    def tree(self, unread: Unread, shape: TreeShape, deepest: int) -> Grown:
        limits = {"width": shape.width, "count": max(map(shape.fan_out, range(1, deepest + 1))), "places": shape.rows}
        inputs = self._inputs(unread, deepest)
        trees = NativeTrees(self._native, *inputs, self._caches, unread.parameters, deepest, **limits)
        return grow(shape, deepest, unread.root, trees.children, trees.run)

    def _inputs(self, unread: Unread, deepest: int) -> tuple[Tensor, Tensor, Tensor, AttentionRows]:
        """Return the first level's inputs: all unread rows, none of them spare."""
        assert unread.rows is not None
        assert int(unread.root.max()) + 1 + deepest <= len(self._native.parts.rotary[0])
        return unread.ids, fused(self._head, unread.features), unread.slots, unread.rows
