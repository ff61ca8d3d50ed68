"""DSpark's objective (arXiv 2607.05147): a mixture of two losses of the logits, and the confidence head's."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor

from models.heads.block import BlockHead
from models.heads.dspark.config import DSparkObjectiveConfig
from train.objectives.base import in_fp32
from train.objectives.block import BlockObjective
from train.objectives.losses.functions import overlap, slot_losses
from train.objectives.teacher import Teacher


class DSparkObjective(BlockObjective):
    config: DSparkObjectiveConfig

    def slot_costs(self, states: Tensor, teacher: Teacher, depth: int) -> tuple[Tensor, Tensor]:
        logits, costs = super().slot_costs(states, teacher, depth)
        label_weight = self.config.label_weight
        with in_fp32(logits.device.type):
            costs = (1 - label_weight) * costs
            if label_weight:
                costs = costs + label_weight * self.share(teacher) * slot_losses("label", logits, teacher)
            corrector = cast(BlockHead, self.head).corrector
            if corrector.predicts_acceptance:
                confidence = corrector.confidence(states)
                accepted = overlap(logits.detach(), teacher).clamp(0, 1)
                costs = costs + self.config.confidence_weight * F.binary_cross_entropy(
                    confidence.exp().clamp(1e-6, 1 - 1e-6), accepted, reduction="none"
                )
        return logits, costs
