"""Training objectives of heads, by name."""

from __future__ import annotations

from train.objectives.base import Objective
from train.objectives.block import BlockObjective, DFlash2Objective, DSparkObjective
from train.objectives.eagle import FeatureRegression
from train.objectives.mtp import MtpObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "ttt": Objective,
    "eagle": FeatureRegression,
    "mtp": MtpObjective,
    "medusa": Objective,
    "mlp": Objective,
    "p-eagle": Objective,
    "dflash": BlockObjective,
    "dspark": DSparkObjective,
    "dflash2": DFlash2Objective,
    "distil": Objective,
}
