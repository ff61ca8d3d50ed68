"""What a head answers at every slot and depth of teacher-forced sequences: the one form in which training runs a head.

Depth k of slot i stands for "k tokens drafted after position i". Tokens are the sequence's own, states the head's: this
equals the engine's drafting of these tokens, which tests assert for every head. Objectives learn from it
(train/objectives/), and simulated acceptance walks it (train/acceptance.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models.attention import TrainingTimeTestAttention
from models.heads.base import Head
from train.objectives import alignment


def draft_states(
    head: Head,
    ids: Tensor,
    aux: Sequence[Tensor],
    steps: int,
    first: int = 0,
    columns: Sequence[Tensor] | None = None,
    starts: Tensor | None = None,
    slots: Tensor | None = None,
) -> Iterator[Tensor]:
    """The states of depths 0 .. K-1 for slots `first ..`: `[B, T - first, S]` each. `head.logits` reads them.

    ids `[B, T]`, aux one `[B, T, Ht]` per feature. Slots that are not asked for lend their keys at depth 0 and stop
    there: those before `first`, or those that are not among `slots` `[B, M]`. With `columns` depth k answers only the
    slots `columns[k]`, a subset of the depth before: what a parallel head learns from (arXiv 2602.01469). starts
    `[B, T]`: where each slot's document begins, if several lie in a row.
    """
    length, attention, own = ids.shape[1], TrainingTimeTestAttention(starts), alignment.positions(ids, starts)
    state = head.fuse([feature.to(head.dtype) for feature in aux]).to(head.dtype)  # under autocast it stays fp32
    mask_slot, every = head.mask_slot(), torch.arange(first, length, device=ids.device)
    kept = every
    for step in range(steps):
        wanted = columns[step] if columns is not None else every if slots is None else slots
        positions = alignment.draft_positions(own, step)
        if step == 0:
            attention.begin_step(0)
            tokens = alignment.draft_tokens(ids, 0)
            state = head.step(tokens, state, positions, attention, 0)
        else:
            attention.begin_step(step, wanted)
            positions = alignment.at(positions, wanted)
            if mask_slot is not None:
                tokens = torch.full_like(positions, mask_slot[0])
                before = mask_slot[1].to(head.dtype).expand(*positions.shape, -1)
            else:
                tokens = alignment.at(alignment.draft_tokens(ids, step), wanted)
                fewer = wanted.shape[-1] < kept.shape[-1]
                before = state[:, torch.searchsorted(kept, wanted)] if fewer else state
            state = head.step(tokens, before, positions, attention, step)
        if step == 0 and (slots is not None or wanted.shape[-1] < length):
            state = alignment.at(state, wanted)
        kept = wanted
        yield state
