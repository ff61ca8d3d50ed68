"""Medusa-1 (arXiv 2401.10774): every head is compared with the target at its own distance, further ones counting less.

The target is frozen. Soft labels are its distribution, hard ones the tokens that the sequence holds.
"""

from __future__ import annotations

from torch import Tensor

from train.config import MedusaObjectiveConfig
from train.objectives.base import Objective
from train.objectives.losses import slot_losses
from train.objectives.teacher import Teacher


class MedusaHeads(Objective):
    config: MedusaObjectiveConfig

    def costs(self, logits: Tensor, states: Tensor, teacher: Teacher, depth: int) -> Tensor:
        if self.config.labels == "hard":
            return slot_losses("label", logits, teacher)
        return slot_losses("kl", logits, teacher) * teacher.in_vocab
