"""The forward pass of a head over teacher-forced sequences, at every slot and depth.

Depth k of slot i stands for "k tokens drafted after position i". Tokens are those of the sequence, states are computed
by the head: this equals the engine drafting these tokens, which tests assert for every head. Used by the objectives
(train/objectives/) and by simulated acceptance (train/evaluation.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models.attention import BlockAttention, ServedAttention, TrainingTimeTestAttention, select
from models.heads.base import Head, MaskHead, RecurrentHead
from models.heads.block import BlockHead, block_inputs
from models.heads.weights import dtype_of
from train.data import alignment


def draft_states(
    head: Head,
    ids: Tensor,
    aux: Sequence[Tensor],
    steps: int,
    first: int = 0,
    slots: Sequence[Tensor] | None = None,
    starts: Tensor | None = None,
    served: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the states of depths 0 .. K-1 for slots `first ..`, `[B, T - first, S]` each, as input of `head.logits`.

    ids `[B, T]`, aux one `[B, T, Ht]` per feature. With `slots` depth k yields only `slots[k]`, `[M]` or `[B, M]`, a
    subset of those of the depth before, as a parallel head is trained (arXiv 2602.01469). All others only contribute
    keys and values at depth 0. starts `[B, T]`: where each slot's document begins, if several are packed into a row.
    served `[N]`: the places in depth 0's slots, flattened, that a recurrent head computes; other states are 0.
    """
    every = torch.arange(first, ids.shape[1], device=ids.device)
    if isinstance(head, BlockHead):
        yield from block_draft_states(head, ids, aux, steps, first, slots, starts)
    elif isinstance(head, RecurrentHead):
        drafted = (every if slots is None else slots[0]).expand(len(ids), -1)
        yield from recurrent_draft_states(head, ids, aux, steps, drafted, starts, served)
    else:
        assert isinstance(head, MaskHead)
        yield from mask_draft_states(head, ids, aux, [every] * steps if slots is None else slots, starts)


def mask_draft_states(
    head: MaskHead, ids: Tensor, aux: Sequence[Tensor], slots: Sequence[Tensor], starts: Tensor | None
) -> Iterator[Tensor]:
    """As `draft_states`, for a mask head."""
    attention, base_pos, dtype = TrainingTimeTestAttention(starts), alignment.positions(ids, starts), dtype_of(head)
    state = head.fuse([feature.to(dtype) for feature in aux]).to(dtype)  # under autocast the result is fp32
    mask_slot = head.mask_slot()
    attention.begin_step(0)
    state = alignment.at(head.step(alignment.draft_tokens(ids, 0), state, base_pos, attention, 0), slots[0])
    yield state
    for step in range(1, len(slots)):
        attention.begin_step(step, slots[step])
        positions = alignment.at(alignment.draft_positions(base_pos, step), slots[step])
        if mask_slot is not None:
            state = mask_slot[1].to(dtype).expand(*positions.shape, -1)
        tokens = torch.full_like(positions, mask_slot[0] if mask_slot else 0)
        state = head.step(tokens, state, positions, attention, step)
        yield state


def recurrent_draft_states(
    head: RecurrentHead,
    ids: Tensor,
    aux: Sequence[Tensor],
    steps: int,
    slots: Tensor,
    starts: Tensor | None,
    served: Tensor | None,
) -> Iterator[Tensor]:
    """As `draft_states`, for a recurrent head and the slots `[B, M]` of all depths.

    What depth 0 reads is computed for all slots, the rest for the served ones, in a line: attention alone runs on rows.
    """
    batch, length = ids.shape
    attention, base_pos, dtype = TrainingTimeTestAttention(starts), alignment.positions(ids, starts), dtype_of(head)
    rows = torch.arange(slots.numel(), device=ids.device) if served is None else served
    kept = (slots + length * torch.arange(batch, device=ids.device)[:, None]).flatten()[rows]
    line = ServedAttention(attention, rows, slots.shape)
    state = head.fuse([feature.to(dtype) for feature in aux]).to(dtype)
    for step in range(steps):
        tokens, positions = alignment.draft_tokens(ids, step), alignment.draft_positions(base_pos, step)
        attention.begin_step(step, slots if step or head.keeps_rows else None)
        if step == 0:
            state = head.step(tokens, state, positions, line._replace(kept=kept) if head.keeps_rows else attention, 0)
            state = state if head.keeps_rows else select(state, kept)
        else:
            state = head.step(tokens.flatten()[kept], state, positions.flatten()[kept], line, step)
        yield line.spread(state)


def block_draft_states(
    head: BlockHead,
    ids: Tensor,
    aux: Sequence[Tensor],
    steps: int,
    first: int,
    slots: Sequence[Tensor] | None,
    starts: Tensor | None,
) -> Iterator[Tensor]:
    """As `draft_states`, for a block drafter: one block per slot of `slots[0]`, of which every depth is yielded."""
    length, base_pos = ids.shape[1], alignment.positions(ids, starts)
    kept = torch.arange(first, length, device=ids.device) if slots is None else slots[0]
    anchor_slots = kept.expand(len(ids), -1)
    attention = BlockAttention(anchor_slots, starts)
    state = head.fuse([feature.to(dtype_of(head)) for feature in aux]).to(dtype_of(head))
    head.write_context(state, base_pos, attention.write)
    rows, corrector = head.config.block_rows(steps), head.corrector
    anchors = alignment.at(alignment.draft_tokens(ids, 0), anchor_slots)
    inputs = block_inputs(head, anchors, alignment.at(base_pos, anchor_slots) + 1, rows)
    states = head.block_states(*inputs, attention.attend, rows)
    carried = corrector.begin(states[:, :, 0])
    for step in range(steps):
        before = alignment.at(alignment.draft_tokens(ids, step), anchor_slots)
        state, carried = corrector.walk(states[:, :, head.config.first_row + step], before, carried)
        yield state
