"""EAGLE-3's training-time test (arXiv 2503.01840): the head runs K steps on its own states, as in serving.

Only tokens are teacher-forced; every step is compared with the target's distribution at the same position.
"""

from __future__ import annotations

from torch import Tensor

from train.objective_config import TttConfig
from train.objectives.base import Objective
from train.objectives.teacher import Teacher


class TrainingTimeTest(Objective):
    config: TttConfig

    @property
    def loss(self) -> str:
        return self.config.loss

    def share(self, teacher: Teacher) -> Tensor:
        return teacher.in_vocab.float() if self.config.drop_out_of_vocab else super().share(teacher)
