"""Objectives: pair every slot and depth with its teacher row, and sum the losses.

`Objective` computes the loss of the logits that its config names. A subclass defines another loss of a slot (`share`,
`logit_costs`, `state_costs`). Losses are sums, not means, so accumulated and distributed batches add up to the loss of
one large batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import vocabulary
from kernels.dispatch import KINDS
from kernels.linear import PackedLinear
from models.heads.base import Head
from models.heads.objectives import ObjectiveConfig
from models.layers import GatedMLP, Linear
from models.targets.llama import LlamaTarget
from train.data import alignment
from train.data.sequences import Batch
from train.features import teacher as teaching
from train.features.online import Features, WholeVocabulary
from train.features.teacher import Teacher
from train.objectives.draft_states import draft_states
from train.objectives.losses import (
    NarrowWeights,
    SharedGradients,
    agreement,
    chunked_sums,
    is_plain,
    overlap,
    slot_losses,
)

NATIVE_LOSSES = ("kl", "ce", "label")


class StepSums(NamedTuple):
    """Sums over the slots of each step, `[K]` each, which add up over batches; means are per `count` or `covered`."""

    count: Tensor
    covered: Tensor  # slots with the target's token in the draft vocabulary
    loss: Tensor  # of the covered slots: its mean compares heads of different draft vocabularies
    correct: Tensor  # draft's argmax == the target's, over the full vocabulary
    overlap: Tensor  # Σ_v min(p, q) over the full vocabulary


class Pairs(NamedTuple):
    """The N slots that a step is trained on, and their teacher."""

    slots: Tensor  # int64 [N], places in the step's states `[B, M, S]`, flattened to `[B * M, S]`
    weights: Tensor  # [N]
    rows: Tensor  # int64 [N], of the teacher
    share: float  # of the slots that the step could be trained on, for which these stand


class Objective(nn.Module):
    """Holds the head, so that a distributed wrapper around this module sees every use of its parameters."""

    reads_states: ClassVar[bool] = False  # compares with the target's hidden states, not with its distributions alone

    def __init__(self, head: Head, config: Any) -> None:
        super().__init__()
        assert isinstance(config, ObjectiveConfig)
        self.head = head
        self.config = config
        steps = config.steps or head.config.max_depth
        assert steps is not None, "a head without a number of depths needs objective.steps"
        self.steps: int = steps
        self._narrow = NarrowWeights()
        self._drafted_rows: PackedLinear | None = None  # of the target's LM head, made when first used
        if config.checkpointing:
            for module in head.modules():
                if isinstance(module, GatedMLP):  # attention caches keys of earlier steps: no recomputation
                    module.forward = partial(checkpoint, module.forward, use_reentrant=False)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trained parameters, in the head's order."""
        return [{"params": [p for p in self.head.parameters() if p.requires_grad]}]

    @property
    def fused(self) -> bool:
        """Whether logits and the teacher's probabilities are materialised only for one chunk of slots at a time."""
        if self.config.fused is not None:
            return self.config.fused
        return next(self.head.parameters()).device.type == "cuda"

    @property
    def native(self) -> bool:
        """Whether LM head and loss run as one kernel (kernels/vocabulary.py), which needs the teacher's logits kept."""
        parameter = next(self.head.parameters())
        return (
            self.config.fused is None
            and type(self).slot_costs is Objective.slot_costs
            and self.config.loss in NATIVE_LOSSES
            and vocabulary.supported(parameter.device, parameter.dtype)
            and all(is_plain(self.head.readout(depth).lm_head) for depth in range(self.steps))
        )

    def teach(self, target: LlamaTarget, hidden: Tensor, batch: Batch, whole: WholeVocabulary | None = None) -> Teacher:
        """Return the teacher for this objective, from the target's last hidden states `[B, T, H]`."""
        if self.native and hidden.dtype in KINDS:
            ids = self.head.target_ids
            if whole is not None and self._drafted_rows is None:
                self._drafted_rows = teaching.drafted_rows(target, ids)
            return teaching.teach_logits(target, hidden, batch, ids, whole, self._drafted_rows)
        return teaching.teach(target, hidden, batch, self.head.target_ids, keep=not self.fused)

    @property
    def step_weight(self) -> float:
        """w in the weight w^k of step k."""
        return self.config.step_weight

    def share(self, teacher: Teacher) -> Tensor:
        """Return the weight of each slot's loss of the logits, `[N]`."""
        return teacher.in_vocab.float() if self.config.drop_out_of_vocab else torch.ones_like(teacher.mass)

    def covered(self, teacher: Teacher) -> Tensor:
        """Return which slots have the token that they are compared with in the draft vocabulary, bool `[N]`."""
        return teacher.in_vocab & (teacher.label >= 0) if self.config.loss == "label" else teacher.in_vocab

    def state_costs(self, states: Tensor, teacher: Teacher) -> Tensor | None:
        """Return the loss of the states `[N, S]` themselves per slot, `[N]`; None if there is none."""
        return None

    def costs(self, logits: Tensor, states: Tensor, teacher: Teacher) -> Tensor:
        """Return the total loss per slot, `[N]`, from logits `[N, Vd]`, states `[N, S]` and N rows of the teacher."""
        costs = self.share(teacher) * slot_losses(self.config.loss, logits, teacher)
        others = self.state_costs(states, teacher)
        return costs if others is None else costs + others

    def slot_costs(self, states: Tensor, teacher: Teacher, depth: int) -> tuple[Tensor, Tensor]:
        """Return the logits `[N, Vd]` that the head drafts from, fp32, and the total loss per slot `[N]`."""
        logits = self.head.logits(states, depth)
        with in_fp32(logits.device.type):
            return logits, self.costs(logits, states.float(), teacher)

    def columns(self, first: int, length: int, generator: torch.Generator) -> Sequence[Tensor] | None:
        """Return the slots that each depth is trained on, each a subset of the depth before; None for all slots."""
        if not self.config.sampled:
            return None
        sizes = alignment.sample_sizes(length - first, map(self.config.slot_share, range(self.steps)))
        order = torch.randperm(length - first, generator=generator, device=generator.device)
        return [first + order[:size].sort().values for size in sizes]

    def denominators(self, batch: Batch) -> Tensor:
        """Return the divisor of each step's sum, `[K]`, which is known before any forward."""
        masks = alignment.step_masks(batch.assistant, self.steps)
        return slot_weights(masks, self.config.reduction, batch.starts)[1]

    def forward(
        self,
        batch: Batch,
        features: Features,
        teacher: Teacher,
        denominators: Tensor,
        metrics: bool = True,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, StepSums]:
        """Return the loss Σ_k w^k · Σ cost_k / denominators[k], and sums to log; `correct`, `overlap` need `metrics`.

        `denominators [K]` are totals over all batches of one optimiser step. `generator` draws the randomness of
        training; without one, as in evaluation, nothing is random.
        """
        aux = features.aux if generator is None else self._noisy(features.aux, generator)
        first, slots = self.slots(batch, generator)
        pairs = list(self.pairs(batch, first, slots))  # what a GPU must be waited for comes before the forward pass
        states = self.states(batch, aux, first, slots, pairs[0].slots)
        return self.losses(states, pairs, teacher, denominators, metrics)

    def states(
        self, batch: Batch, aux: Sequence[Tensor], first: int, slots: Sequence[Tensor], served: Tensor
    ) -> Iterator[Tensor]:
        """Yield the states of each step's slots, `[B, M, S]`; `served` as `draft_states` takes it."""
        return draft_states(self.head, batch.ids, aux, self.steps, first, slots, batch.starts, served)

    def slots(self, batch: Batch, generator: torch.Generator | None) -> tuple[int, Sequence[Tensor]]:
        """Return the first slot that is trained on, and the slots of each step, as `draft_states` takes them."""
        served = alignment.served(batch.assistant)
        first, length = int(served.any(0).int().argmax()), batch.ids.shape[1]
        columns = None if generator is None else self.columns(first, length, generator)
        return first, columns or [alignment.served_slots(served)] * self.steps

    def pairs(self, batch: Batch, first: int, slots: Sequence[Tensor]) -> Iterator[Pairs]:
        """Pair the `slots` of each step with the rows of the teacher.

        The teacher of slot i at step k is the row of served slot i + k: rows are numbered in slot order. Slots
        that were sampled for each sequence stand for all its served slots.
        """
        masks = alignment.step_masks(batch.assistant, self.steps)  # [K, B, T]
        weights, _ = slot_weights(masks, self.config.reduction, batch.starts)
        numbers = masks[0].flatten().cumsum(0).view_as(masks[0]) - 1
        for step, kept in enumerate(slots):
            trained = alignment.at(masks[step], kept).flatten().nonzero().squeeze(-1)
            rows = alignment.at(alignment.shift_left(numbers, step), kept)
            weight, share = alignment.at(weights[step], kept), 1.0
            if kept.ndim == 2:
                sampled = alignment.at(masks[0], kept).sum(-1, keepdim=True).clamp(min=1)
                weight = weight * (masks[0].sum(-1, keepdim=True) / sampled)
            else:
                share = max(1, len(kept)) / (batch.ids.shape[1] - first)
            yield Pairs(trained, weight.flatten()[trained], rows.flatten()[trained], share)

    def losses(
        self, states: Iterable[Tensor], pairs: Iterable[Pairs], teacher: Teacher, denominators: Tensor, metrics: bool
    ) -> tuple[Tensor, StepSums]:
        """Return the loss and sums of `forward`, from the states of all steps."""
        self._narrow.renew()
        sums, total = [], denominators.new_zeros((), dtype=torch.float32)
        gradients = SharedGradients(self.head.parameters())
        for step, (state, pair) in enumerate(zip(states, pairs, strict=True)):
            chosen = state.flatten(0, 1)[pair.slots]
            weight, divisor = self.step_weight**step / pair.share, denominators[step].clamp(min=1)
            factor = weight / divisor
            parts = self.compare(chosen, pair.weights, pair.rows, teacher, step, metrics, gradients, factor)
            total = total + weight * parts[0] / divisor
            count = parts[0].new_full((), len(chosen), dtype=torch.float32)
            sums.append(torch.stack([count, *(value.detach() for value in parts[1:])]))
        return gradients.attach(total), StepSums(*torch.stack(sums, dim=1))

    def _noisy(self, aux: Sequence[Tensor], generator: torch.Generator) -> Sequence[Tensor]:
        """Add noise U(-a, a) to every feature, against the accumulation of small draft errors (arXiv 2401.15077)."""
        a = self.config.feature_noise
        if not a:
            return aux
        return [
            feature + a * (2 * torch.rand(feature.shape, generator=generator, device=feature.device) - 1)
            for feature in aux
        ]

    def compare(
        self,
        states: Tensor,
        weights: Tensor,
        rows: Tensor,
        teacher: Teacher,
        depth: int,
        metrics: bool,
        gradients: SharedGradients,
        factor: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return sums over slots, `states [N, S]` with teacher `rows [N]`: of weighted cost, then those of `StepSums`.

        If fused, the derivatives with respect to parameters of `factor` times the first sum are added to `gradients`.
        """
        size = max(1, teaching.CHUNK_ELEMENTS // self.head.config.draft_vocab_size)
        if teacher.logits is not None and self.native:
            return self._compare_native(states, weights, teacher.rows(rows), depth, metrics)
        if self.fused:
            compare = partial(self._compare_chunk, teacher=teacher, depth=depth, metrics=metrics)
            return chunked_sums(compare, states, weights, rows, size, gradients, factor)
        if len(states) <= size:
            return self._compare_chunk(states, weights, rows, teacher, depth, metrics)
        # Logits of all steps together would not fit in memory: each chunk's are recomputed in the backward pass.
        parts = [
            checkpoint(self._compare_chunk, part, weight, index, teacher, depth, metrics, use_reentrant=False)
            for part, weight, index in zip(states.split(size), weights.split(size), rows.split(size), strict=True)
        ]
        return tuple(torch.stack(column).sum(0) for column in zip(*parts, strict=True))

    def _compare_native(
        self, states: Tensor, weights: Tensor, teacher: Teacher, depth: int, metrics: bool
    ) -> tuple[Tensor, ...]:
        assert teacher.logits is not None
        lm_head, before = self.head.readout(depth)
        x, weight = before(states), cast(Linear, lm_head).weight
        label = {"kl": None, "ce": teacher.draft_choice, "label": teacher.label}[self.config.loss]
        share = self.share(teacher)
        costs = vocabulary.linear_loss(
            x, weight, weights * share, *teacher.logits, label, narrow=self._narrow(weight), overlap=metrics
        )
        others = self.state_costs(states.float(), teacher)
        covered = self.covered(teacher).float()
        loss, cost = costs.total, (covered * share * costs.cost).sum()
        if others is not None:
            loss, cost = loss + (others * weights).sum(), cost + (covered * others.detach()).sum()
        if not metrics:
            return loss, covered.sum(), cost, cost.new_zeros(()), cost.new_zeros(())
        assert costs.overlap is not None
        correct = (costs.best == teacher.draft_choice) & teacher.in_vocab
        return loss, covered.sum(), cost, correct.sum().float(), costs.overlap.sum()

    def _compare_chunk(
        self, states: Tensor, weights: Tensor, rows: Tensor, teacher: Teacher, depth: int, metrics: bool
    ) -> tuple[Tensor, ...]:
        teacher = teacher.rows(rows).whole()
        logits, costs = self.slot_costs(states, teacher, depth)
        with in_fp32(logits.device.type):
            covered, zero = self.covered(teacher).float(), costs.new_zeros(())
            sums = (costs * weights).sum(), covered.sum(), (covered * costs).sum()
            if not metrics:
                return *sums, zero, zero
            with torch.no_grad():
                correct, accepted = agreement(logits, teacher).sum().float(), overlap(logits, teacher).sum()
        return *sums, correct, accepted


def in_fp32(device: str) -> AbstractContextManager[Any]:
    """Disable autocast: probabilities need more than bf16."""
    return torch.autocast(device, enabled=False)


def slot_weights(masks: Tensor, reduction: str, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each slot's weight `[K, B, T]` and the divisors of the weighted sums `[K]`, from masks `[K, B, T]`.

    token: all slots have equal weight. sequence: all sequences have equal weight, however many slots they have;
    `starts` `[B, T]` separates the sequences of a packed row.
    """
    if reduction == "token":
        return masks.float(), masks.flatten(1).sum(1).float()
    owner = torch.zeros_like(masks, dtype=torch.int64) if starts is None else starts.expand_as(masks)
    counts = torch.zeros_like(owner).scatter_add(-1, owner, masks.long())  # per sequence, stored at its first slot
    return masks / counts.gather(-1, owner).clamp(min=1), (counts > 0).flatten(1).sum(1).float()
