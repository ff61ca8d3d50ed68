"""FLOPs that a training step needs for its head; divided by time and peak FLOP/s, model FLOPs utilisation (MFU).

Counts the matrix products of a forward on real tokens, times three to include the backward pass. Anything computed
beyond that (padding, recomputed logits) is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from models.heads.base import Head
from models.heads.weights import dtype_of
from train.objectives.draft_states import draft_states

WITH_BACKWARD = 3  # forward, gradient of the input, gradient of the weight


class HeadFlops(NamedTuple):
    per_token: float  # states of all depths
    per_slot: float  # logits of one slot that is compared with the teacher, averaged over depths

    def step(self, tokens: float, slots: float) -> float:
        """Return the FLOPs of a step; `slots` is summed over all depths."""
        return self.per_token * tokens + self.per_slot * slots


@torch.no_grad()
def head_flops(head: Head, steps: int) -> HeadFlops:
    """Count the head's FLOPs by running a single token through it; its parameters must not be sharded."""
    device = next(head.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    feature = torch.zeros(1, 1, head.config.target_hidden_size, dtype=dtype_of(head), device=device)
    aux = [feature] * len(head.config.aux_layers)
    with FlopCounterMode(display=False) as body:
        states = list(draft_states(head, ids, aux, steps))
    with FlopCounterMode(display=False) as logits:
        for depth, state in enumerate(states):
            head.logits(state, depth)
    return HeadFlops(WITH_BACKWARD * body.get_total_flops(), WITH_BACKWARD * logits.get_total_flops() / steps)
