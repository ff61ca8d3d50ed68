"""The objectives of block drafters: the depths of blocks at random slots of responses (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from models.heads.block import BlockHead, base_logits
from models.heads.dflash2.config import DFlash2ObjectiveConfig
from models.heads.dflash2.head import DFlash2Head
from models.heads.dspark.config import DSparkObjectiveConfig
from models.heads.objectives import BlockObjectiveConfig
from train.data import alignment
from train.data.sequences import Batch
from train.features.teacher import Teacher
from train.objectives.base import Objective, Pairs, StepSums, in_fp32
from train.objectives.losses import overlap, slot_losses


class BlockObjective(Objective):
    """In training at most `num_anchors` served slots of each sequence start a block; without a generator all do."""

    config: BlockObjectiveConfig

    def slots(self, batch: Batch, generator: torch.Generator | None) -> tuple[int, Sequence[Tensor]]:
        served = alignment.served(batch.assistant)
        slots = alignment.served_slots(served)
        if generator is not None and slots.shape[1] > self.config.num_anchors:
            slots = random_slots(served, self.config.num_anchors, generator)
        return 0, [slots] * self.steps

    @property
    def step_weight(self) -> float:
        return self.config.step_weight if self.config.weighting == "decay" else 1.0

    def losses(
        self, states: Iterable[Tensor], pairs: Iterable[Pairs], teacher: Teacher, denominators: Tensor, metrics: bool
    ) -> tuple[Tensor, StepSums]:
        if self.config.weighting == "dpace":
            states, pairs = list(states), list(pairs)
            weights = self._dpace(states, pairs, teacher)
            pairs = [p._replace(weights=p.weights * w) for p, w in zip(pairs, weights, strict=True)]
        return super().losses(states, pairs, teacher, denominators, metrics)

    @torch.no_grad()
    def _dpace(self, states: Sequence[Tensor], pairs: Sequence[Pairs], teacher: Teacher) -> list[Tensor]:
        """Return D-PACE's weight of each of the N slots of every step."""
        count = states[0].shape[0] * states[0].shape[1]
        probabilities = states[0].new_ones(self.steps, count, dtype=torch.float32)
        valid = torch.zeros(self.steps, count, dtype=torch.bool, device=states[0].device)
        for step, (state, pair) in enumerate(zip(states, pairs, strict=True)):
            rows, labels = state.flatten(0, 1)[pair.slots], teacher.label[pair.rows]
            parts = [
                label_probabilities(self.head.logits(chunk, step), label)
                for chunk, label in zip(rows.split(LABEL_ROWS), labels.split(LABEL_ROWS), strict=True)
            ]
            if parts:
                probabilities[step, pair.slots] = torch.cat(parts)
            valid[step, pair.slots] = True
        weights = dpace_weights(probabilities, valid)
        return [weights[step, pair.slots] for step, pair in enumerate(pairs)]


LABEL_ROWS = 512  # whose logits are in memory at a time
DPACE_FLOOR = 0.5  # α: a token that the draft rules out still lets the later ones count


def label_probabilities(logits: Tensor, label: Tensor) -> Tensor:
    """Return the probability `[N]` of the draft id `label` `[N]` under logits `[N, Vd]`; 0 for a label of -1."""
    value = logits.gather(-1, label.clamp(min=0)[:, None]).squeeze(-1) - logits.logsumexp(-1)
    return torch.where(label < 0, 0.0, value.exp())


def dpace_weights(probabilities: Tensor, valid: Tensor) -> Tensor:
    """Return the weights `[K, N]` of D-PACE (arXiv 2605.18810) from the labels' probabilities `[K, N]` in the draft.

    P_k is the product of (1 - α) q_j + α over j <= k, a smoothed probability that the first k + 1 tokens are accepted;
    the weight of step k is the sum of P_j over valid j >= k. Steps that are not `valid` `[K, N]` count as certain.
    """
    smoothed = torch.where(valid, (1 - DPACE_FLOOR) * probabilities + DPACE_FLOOR, 1.0)
    reached = smoothed.cumprod(0) * valid
    return reached.flip(0).cumsum(0).flip(0)


def random_slots(served: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` random served slots of each row of `served` `[B, T]`, ascending, `[B, count]`.

    Rows with fewer served slots are padded with other slots of the row.
    """
    order = torch.rand(served.shape, generator=generator, device=generator.device).to(served.device)
    return (order + (~served).float()).argsort(dim=-1)[:, :count].sort(dim=-1).values


class DSparkObjective(BlockObjective):
    """A mixture of two losses of the logits, and the confidence head's (arXiv 2607.05147)."""

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


class DFlash2Objective(BlockObjective):
    """The loss of the LM head's logits, and the cross-entropy of the selector over its candidates."""

    config: DFlash2ObjectiveConfig

    def slot_costs(self, states: Tensor, teacher: Teacher, depth: int) -> tuple[Tensor, Tensor]:
        """The text's token takes the place of the last candidate where it is none; without a draft id it costs 0."""
        head = cast(DFlash2Head, self.head)
        selector = head.candidate_selector
        base = base_logits(head, states)
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
        return selector.corrected(base.detach(), states.detach()), costs
