"""EAGLE-1's objective (arXiv 2401.15077): predict the target's next hidden state, and so its next distribution.

With more than one step the head also runs on its own predictions, under the attention of serving (HASS, arXiv
2408.15766), every step counting alike.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from train.objective_config import EagleObjectiveConfig
from train.objectives.base import Objective
from train.objectives.losses import slot_losses
from train.objectives.teacher import Teacher


class FeatureRegression(Objective):
    """Slot i's state at step k is its prediction of f[i+1+k]."""

    config: EagleObjectiveConfig

    def costs(self, logits: Tensor, states: Tensor, teacher: Teacher, depth: int) -> Tensor:
        distance = F.smooth_l1_loss(states, teacher.hidden.float(), reduction="none").mean(-1)
        soft = slot_losses("kl", logits, teacher)  # the cross-entropy less the target's own entropy
        return self.config.regression_weight * distance + self.config.distribution_weight * soft
