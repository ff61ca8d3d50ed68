"""DFlash2's objective: the loss of the LM head's logits, and the cross-entropy of the selector over its candidates."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from models.heads.block import base_logits
from models.heads.dflash2.config import DFlash2ObjectiveConfig
from models.heads.dflash2.head import DFlash2Head
from train.objectives.base import in_fp32
from train.objectives.block import BlockObjective
from train.objectives.teacher import Teacher


class DFlash2Objective(BlockObjective):
    config: DFlash2ObjectiveConfig

    def slot_costs(self, states: Tensor, teacher: Teacher, depth: int) -> tuple[Tensor, Tensor]:
        """The text's token takes the place of the last candidate where it is none; without a draft id it costs 0."""
        head = cast(DFlash2Head, self.head)
        selector = head.candidate_selector
        base = base_logits(head, states).float()
        with in_fp32(base.device.type):
            costs = self.costs(base, states.float(), teacher)
            candidates = base.detach().topk(head.config.selector_top_k, dim=-1).indices
            label = teacher.label.clamp(min=0)[:, None]
            missing = (candidates != label).all(-1)
            last = torch.where(missing, label[:, 0], candidates[:, -1])
            candidates = torch.cat([candidates[:, :-1], last[:, None]], dim=-1)
            scores = base.gather(-1, candidates) + selector.scores(states, candidates).float()
            place = (candidates == label).int().argmax(-1)
            place = torch.where(teacher.label < 0, -1, place)
            selected = F.cross_entropy(scores, place, reduction="none", ignore_index=-1)
        costs = costs + self.config.selector_weight * selected
        return selector.corrected(base.detach(), states.detach()).float(), costs
