"""EAGLE-1's objective (arXiv 2401.15077): predict the target's next hidden state, and thereby its next distribution.

With more than one step the head also runs on its own predictions, with the attention it has in serving (HASS, arXiv
2408.15766), and all steps have the same weight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from models.heads.eagle.config import EagleObjectiveConfig
from train.features.teacher import Teacher
from train.objectives.base import Objective

DISTRIBUTION_WEIGHT = 0.1  # of the next-token distributions' KL beside the regression, as in the paper


class FeatureRegression(Objective):
    """Slot i's state at step k is its prediction of f[i+1+k]."""

    config: EagleObjectiveConfig
    reads_states = True

    def share(self, teacher: Teacher) -> Tensor:  # KL: the cross-entropy minus the target's entropy
        return torch.full_like(teacher.mass, DISTRIBUTION_WEIGHT)

    def state_costs(self, states: Tensor, teacher: Teacher) -> Tensor:
        return F.smooth_l1_loss(states, teacher.hidden.float(), reduction="none").mean(-1)
