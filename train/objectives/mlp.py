"""The MLP speculator's objective (arXiv 2404.19124): the sum over heads of the cross-entropy with the actual token.

Our sequences are the target's own samples and each slot's hidden state is the one that produced its token, which is
what the paper calls stage 2; data.responses=given is stage 1, ground-truth text.
"""

from __future__ import annotations

from train.objective_config import MlpObjectiveConfig
from train.objectives.base import Objective


class NextTokens(Objective):
    config: MlpObjectiveConfig

    @property
    def loss(self) -> str:
        return "label"
