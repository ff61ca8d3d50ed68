"""Training objectives of heads, by name, and that of EAGLE-1."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from models.heads.eagle.config import EagleObjectiveConfig
from train.objectives.base import Objective
from train.objectives.block import BlockObjective, DFlash2Objective, DSparkObjective
from train.objectives.joint import JointObjective
from train.objectives.teacher import Teacher

DISTRIBUTION_WEIGHT = 0.1  # of the next-token distributions' KL beside the regression, as in the paper


class FeatureRegression(Objective):
    """EAGLE-1 (arXiv 2401.15077): slot i's state at step k is its prediction of f[i+1+k], the target's hidden state.

    With more than one step the head also runs on its own predictions, with the attention it has in serving (HASS, arXiv
    2408.15766), and all steps have the same weight.
    """

    config: EagleObjectiveConfig

    def share(self, teacher: Teacher) -> Tensor:  # KL: the cross-entropy minus the target's entropy
        return torch.full_like(teacher.mass, DISTRIBUTION_WEIGHT)

    def state_costs(self, states: Tensor, teacher: Teacher) -> Tensor:
        return F.smooth_l1_loss(states, teacher.hidden.float(), reduction="none").mean(-1)


OBJECTIVES: dict[str, type[Objective]] = {
    "ttt": Objective,
    "eagle": FeatureRegression,
    "medusa": Objective,
    "medusa-2": JointObjective,
    "mlp": Objective,
    "p-eagle": Objective,
    "dflash": BlockObjective,
    "dspark": DSparkObjective,
    "dflash2": DFlash2Objective,
    "distil": Objective,
}
