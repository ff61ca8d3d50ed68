"""FastMTP's objective (arXiv 2509.18362), as speculators trains modules: each step is a causal forward of its own.

A slot keeps its position in every step, and attends to the step's rows of the slots up to it. In serving, later tokens
have later positions and attend to rows of the first step (training-time test): this is an approximation of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from models.attention import CausalAttention
from models.heads.base import RecurrentHead
from models.heads.mtp.config import MtpObjectiveConfig
from models.heads.weights import dtype_of
from train.data import alignment
from train.data.sequences import Batch
from train.objectives.base import Objective


class MtpObjective(Objective):
    config: MtpObjectiveConfig

    def denominators(self, batch: Batch) -> Tensor:
        """Return those of the steps' means, times what makes the weights of the steps add up to one."""
        return super().denominators(batch) * sum(self.step_weight**step for step in range(self.steps))

    def states(
        self, batch: Batch, aux: Sequence[Tensor], first: int, slots: Sequence[Tensor], served: Tensor
    ) -> Iterator[Tensor]:
        head, attention, dtype = self.head, CausalAttention(batch.starts), dtype_of(self.head)
        assert isinstance(head, RecurrentHead)
        state = head.fuse([feature.to(dtype) for feature in aux])
        positions = alignment.positions(batch.ids, batch.starts)
        for step in range(self.steps):
            tokens = alignment.draft_tokens(batch.ids, step)
            state = head.step(tokens, state.to(dtype), positions, attention, step)
            yield alignment.at(state, slots[step])
