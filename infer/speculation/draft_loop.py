"""Drafts with a recurrent head: chains and trees, by the head's own operations or by one C call per level.

Both loops draft the same tokens. A level is one forward over the nodes that are grown. Parallel heads, which have all
levels after one forward, have loops of their own (proposers/parallel_loop.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.speculation.early_exit import EarlyExit, HostExit
from infer.speculation.tree import MAX_NODES
from infer.speculation.tree_shapes import Children, Run, TreeShape, grow
from kernels.choose import ChoiceParameters, choose, choose_best
from kernels.draft import NativeChains, NativeDraft, NativeTrees
from kernels.early_exit import Drafting
from kernels.rows import AttentionRows
from kernels.tree import Candidates, Picked
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


def fused(head: Head, features: Tensor) -> Tensor:
    """Return the states `[R, S]` that depth 0 of the head reads, from the features of all aux layers `[R, F]`."""
    return head.fuse(features.chunk(len(head.config.aux_layers), dim=-1))


def positions_from(root: Tensor, count: int) -> Tensor:
    """root `[B]` -> root, root + 1, ... `[count, B]`, rows that begin at multiples of 16 bytes."""
    batch, steps = len(root), torch.arange(count, device=root.device)
    return torch.add(root, steps[:, None], out=root.new_empty(count, batch + batch % 2)[:, :batch])


class TorchLoop:
    """Drafts by the head's own operations, on any device.

    The host does not wait for results unless `early_exit` or `adjust` does, so a CUDA graph can capture a draft.
    `attend` makes the attention of rows in the head's KV layers; None for a head without KV.
    """

    def __init__(self, head: Head, attend: Callable[[AttentionRows], Attention] | None) -> None:
        self._head, self._attend, self.draft_ids = head, attend, head.target_ids

    def spare_rows(self, deepest: int) -> int:
        """Return how many spare rows a request needs for drafts of this depth."""
        return 0

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
        positions = positions_from(unread.root, deepest)  # slot i drafts what the target chooses at position i + 1
        logits_at = self._logits(unread, positions)
        drafted, scores, chains = list[Tensor](), list[Tensor](), None if early_exit is None else Drafting.begin(depths)
        for level in range(deepest):
            logits, confidence = logits_at(level, drafted)
            if adjust is not None:
                logits = adjust(logits, drafted)
            if early_exit is None or chains is None:
                drafted.append(self.choice(logits, positions[level], unread.parameters))
                continue
            token, log_probs = self.best(logits, positions[level], unread.parameters, 1)
            drafted.append(token[:, 0])
            scores.append(log_probs[:, 0] if confidence is None else confidence)
            chains = early_exit(level, scores[-1], chains, depths)
            if early_exit.on_host and not bool(chains.active.any()):
                break
        length = depths.clamp(max=deepest) if chains is None else chains.length
        return Chains(torch.stack(drafted, dim=1), length, torch.stack(scores, dim=1) if scores else None)

    def tree(self, unread: Unread, shape: TreeShape, deepest: int) -> Candidates:
        """Grow trees of this shape down to the depth `deepest`."""
        return grow(shape, deepest, unread.root, *self._growing(unread, deepest))

    def choice(self, logits: Tensor, positions: Tensor, parameters: ChoiceParameters | None) -> Tensor:
        """Return the head's choice `[R]` (target ids), under the noise of the target's choice at the same position."""
        return choose(logits, parameters, positions, self.draft_ids)

    def best(
        self, logits: Tensor, positions: Tensor, parameters: ChoiceParameters | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return each row's `count` best target ids under the same noise, `[R, count]`, and their log-probabilities."""
        return choose_best(logits, parameters, positions, self.draft_ids, min(count, logits.shape[1]))

    def _step(self, ids: Tensor, state: Tensor, slots: Tensor, rows: AttentionRows | None, depth: int) -> Tensor:
        attention = no_attention if self._attend is None or rows is None else self._attend(rows)
        return self._head.step(ids, state, slots, attention, depth)

    def _logits(self, unread: Unread, positions: Tensor) -> LogitsAt:
        """Return what gives the logits of each level of a chain, at positions `[levels, B]`."""
        state, after_root = self.read(unread), unread.root - unread.base

        def logits_at(level: int, drafted: Sequence[Tensor]) -> tuple[Tensor, None]:
            nonlocal state
            if level:
                rows = self._past(unread, after_root, 1, shift=level)
                state = self._step(drafted[-1], state, positions[level - 1], rows, level)
            return self._head.logits(state, level), None

        return logits_at

    def _past(
        self, unread: Unread, start: Tensor, width: int, *, shift: int, offset: int = 0, tree_mask: Tensor | None = None
    ) -> AttentionRows | None:
        """Address `width` nodes of each request past its unread rows; arguments as for AttentionRows.grid."""
        rows = unread.rows
        if rows is None:
            return None
        where = {"shift": shift, "offset": offset, "tree_mask": tree_mask, "first": rows.first}
        longest = rows.longest + (shift + width - 1 if tree_mask is None else MAX_NODES)
        sizes = {"page_size": rows.page_size, "longest": longest}
        return AttentionRows.grid(rows.table, unread.requests, start, width, **sizes, **where)

    # ---- callbacks of `grow` --------------------------------------------------------------------------------------

    def _growing(self, unread: Unread, deepest: int) -> tuple[Children, Run]:
        """Each node attends to its own ancestors."""
        after_root, positions = unread.root - unread.base, positions_from(unread.root, deepest)
        state, ran = self.read(unread)[:, None], 0  # [B, M, S] of the nodes that a level is grown from

        def children(level: int, fan_out: int) -> tuple[Tensor, Tensor]:
            logits = self._head.logits(state.flatten(0, 1), level - 1).unflatten(0, state.shape[:2])
            return self._best_of_nodes(logits, positions[level - 1], unread.parameters, fan_out)

        def run(level: int, picked: Picked) -> None:
            nonlocal state, ran
            width, tree_mask = picked.parent.shape[1], picked.frontier.tree_mask
            above = state.gather(1, picked.parent[..., None].expand(-1, -1, state.shape[-1])).flatten(0, 1)
            rows = self._past(unread, after_root, width, shift=1, offset=ran, tree_mask=tree_mask)
            slots = positions[level - 1].repeat_interleave(width)
            state = self._step(picked.token.flatten(), above, slots, rows, level).unflatten(0, (-1, width))
            ran += width

        return children, run

    def _best_of_nodes(
        self, logits: Tensor, positions: Tensor, parameters: ChoiceParameters | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """As `best`, for M nodes of each request at positions `[B]`: logits `[B, M, Vd]` -> `[B, M, count]` each."""
        width = logits.shape[1]
        parameters = parameters and parameters.repeated(width)
        tokens, values = self.best(logits.flatten(0, 1), positions.repeat_interleave(width), parameters, count)
        return tokens.unflatten(0, (-1, width)), values.unflatten(0, (-1, width))


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

    def tree(self, unread: Unread, shape: TreeShape, deepest: int) -> Candidates:
        limits = {"width": shape.width, "count": max(map(shape.fan_out, range(1, deepest + 1))), "places": shape.rows}
        inputs = self._inputs(unread, deepest)
        trees = NativeTrees(self._native, *inputs, self._caches, unread.parameters, deepest, **limits)
        return grow(
            shape,
            deepest,
            unread.root,
            trees.children,
            lambda level, picked: trees.run(level, picked.parent, picked.token),
        )

    def _inputs(self, unread: Unread, deepest: int) -> tuple[Tensor, Tensor, Tensor, AttentionRows]:
        """Return the first level's inputs: all unread rows, none of them spare."""
        assert unread.rows is not None
        assert int(unread.root.max()) + 1 + deepest <= len(self._native.parts.rotary[0])
        return unread.ids, fused(self._head, unread.features), unread.slots, unread.rows
