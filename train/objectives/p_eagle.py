"""P-EAGLE's objective (arXiv 2602.01469): EAGLE-3's loss at every depth of the parallel draft.

Depth 0 is trained on every slot, depth d on a sample of the share max(ratio ** d, min_ratio), whose slots have a row at
every shallower depth too. K depths then cost far less than K passes over the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from train.objective_config import PEagleObjectiveConfig
from train.objectives import alignment
from train.objectives.base import Objective
from train.objectives.teacher import Teacher


class ParallelDrafting(Objective):
    config: PEagleObjectiveConfig

    @property
    def loss(self) -> str:
        return self.config.loss

    def share(self, teacher: Teacher) -> Tensor:
        return teacher.in_vocab.float() if self.config.drop_out_of_vocab else super().share(teacher)

    def columns(self, first: int, length: int, generator: torch.Generator) -> Sequence[Tensor]:
        sizes = alignment.sample_sizes(length - first, self.steps, self.config.ratio, self.config.min_ratio)
        order = torch.randperm(length - first, generator=generator, device=generator.device)
        return [first + order[:size].sort().values for size in sizes]
