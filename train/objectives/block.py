"""The objective of block drafters (DFlash, arXiv 2602.06036): the depths of blocks at random slots of the responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.heads.objectives import BlockObjectiveConfig
from train.data.sequences import Batch
from train.objectives import alignment
from train.objectives.base import Objective


class BlockObjective(Objective):
    """In training at most `num_anchors` served slots of each sequence start a block; without a generator all do."""

    config: BlockObjectiveConfig

    def slots(self, batch: Batch, generator: torch.Generator | None) -> tuple[int, Sequence[Tensor]]:
        served = alignment.served(batch.assistant)
        slots = alignment.served_slots(served)
        if generator is not None and slots.shape[1] > self.config.num_anchors:
            slots = random_slots(served, self.config.num_anchors, generator)
        return 0, [slots] * self.steps


def random_slots(served: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` random served slots of each row of `served` `[B, T]`, ascending, `[B, count]`.

    Rows with fewer served slots are padded with other slots of the row.
    """
    order = torch.rand(served.shape, generator=generator, device=generator.device).to(served.device)
    return (order + (~served).float()).argsort(dim=-1)[:, :count].sort(dim=-1).values
