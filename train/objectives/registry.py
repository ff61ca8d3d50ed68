"""Training objectives of heads, by name."""

from __future__ import annotations

from train.objectives.base import Objective
from train.objectives.eagle import FeatureRegression
from train.objectives.medusa import MedusaHeads, MedusaTogether
from train.objectives.mlp import NextTokens
from train.objectives.p_eagle import ParallelDrafting
from train.objectives.ttt import TrainingTimeTest

OBJECTIVES: dict[str, type[Objective]] = {
    "ttt": TrainingTimeTest,
    "eagle": FeatureRegression,
    "medusa": MedusaHeads,
    "medusa-2": MedusaTogether,
    "mlp": NextTokens,
    "p-eagle": ParallelDrafting,
}
