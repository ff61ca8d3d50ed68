"""The forward pass of a head over teacher-forced sequences, at every slot and depth.

Depth k of slot i stands for "k tokens drafted after position i". Tokens are those of the sequence, states are computed
by the head: this equals the engine drafting these tokens, which tests assert for every head. Used by the objectives
(train/objectives/) and by simulated acceptance (train/evaluation.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models.attention import BlockAttention, TrainingTimeTestAttention
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
) -> Iterator[Tensor]:
    """Yield the states of depths 0 .. K-1 for slots `first ..`, `[B, T - first, S]` each, as input of `head.logits`.

    ids `[B, T]`, aux one `[B, T, Ht]` per feature. With `slots` depth k yields only `slots[k]`, `[M]` or `[B, M]`, a
    subset of those of the depth before, as a parallel head is trained (arXiv 2602.01469). All others only contribute
    keys and values at depth 0. starts `[B, T]`: where each slot's document begins, if several are packed into a row.
    """
    if isinstance(head, BlockHead):
        yield from block_draft_states(head, ids, aux, steps, first, slots, starts)
        return
    assert isinstance(head, RecurrentHead | MaskHead)
    length, attention, base_pos = ids.shape[1], TrainingTimeTestAttention(starts), alignment.positions(ids, starts)
    dtype = dtype_of(head)
    state = head.fuse([feature.to(dtype) for feature in aux]).to(dtype)  # under autocast the result is fp32
    mask_slot = head.mask_slot() if isinstance(head, MaskHead) else None
    all_slots = torch.arange(first, length, device=ids.device)
    previous_slots = all_slots
    for step in range(steps):
        step_slots = all_slots if slots is None else slots[step]
        positions = alignment.draft_positions(base_pos, step)
        if step == 0:
            attention.begin_step(0)
            tokens = alignment.draft_tokens(ids, 0)
            state = head.step(tokens, state, positions, attention, 0)
        else:
            attention.begin_step(step, step_slots)
            positions = alignment.at(positions, step_slots)
            if mask_slot is not None:
                tokens = torch.full_like(positions, mask_slot[0])
                before = mask_slot[1].to(dtype).expand(*positions.shape, -1)
            else:
                tokens = alignment.at(alignment.draft_tokens(ids, step), step_slots)
                fewer = step_slots.shape[-1] < previous_slots.shape[-1]
                before = state[:, torch.searchsorted(previous_slots, step_slots)] if fewer else state
            state = head.step(tokens, before, positions, attention, step)
        if step == 0 and (step_slots.ndim == 2 or step_slots.shape[-1] < length):
            state = alignment.at(state, step_slots)
        previous_slots = step_slots
        yield state


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
