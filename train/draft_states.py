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
from train import alignment


def draft_states(
    head: Head,
    ids: Tensor,
    aux: Sequence[Tensor],
    steps: int,
    first: int = 0,
    columns: Sequence[Tensor] | None = None,
    starts: Tensor | None = None,
) -> Iterator[Tensor]:
    """The states of depths 0 .. K-1 for slots `first ..`: `[B, T - first, S]` each. `head.logits` reads them.

    ids `[B, T]`, aux one `[B, T, Ht]` per feature. Slots before `first` lend their keys at depth 0 and stop there. With
    `columns` depth k answers only the slots `columns[k]`, a subset of the depth before: what a parallel head learns
    from (arXiv 2602.01469). starts `[B, T]`: where each slot's document begins, if several lie in a row.
    """
    length, attention, own = ids.shape[1], TrainingTimeTestAttention(starts), alignment.positions(ids, starts)
    state = head.fuse([feature.to(head.dtype) for feature in aux]).to(head.dtype)  # under autocast it stays fp32
    mask_slot, kept = head.mask_slot(), torch.arange(length, device=ids.device)
    for step in range(steps):
        wanted = torch.arange(first, length, device=ids.device) if columns is None else columns[step]
        positions = alignment.draft_positions(own, step)
        if step == 0:
            attention.begin_step(0)
            tokens = alignment.draft_tokens(ids, 0)
            state = head.step(tokens, state, positions, attention, 0)
        else:
            attention.begin_step(step, wanted)
            positions = positions[:, wanted]
            if mask_slot is not None:
                tokens = torch.full_like(positions, mask_slot[0])
                before = mask_slot[1].to(head.dtype).expand(*positions.shape, -1)
            else:
                tokens = alignment.draft_tokens(ids, step)[:, wanted]
                before = state if len(wanted) == len(kept) else state[:, torch.searchsorted(kept, wanted)]
            state = head.step(tokens, before, positions, attention, step)
        if step == 0 and len(wanted) < length:
            state = state[:, first:] if columns is None else state[:, wanted]
        kept = wanted
        yield state
