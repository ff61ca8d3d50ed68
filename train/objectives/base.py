"""What all objectives share: which slot is compared with what at which depth, and the sums that a loss is made of.

An objective says what a slot costs (`loss`, `share`, `state_costs`), and, if need be, which slots a depth looks at
(`columns`). Sums and not means: accumulated and distributed batches add up to the loss of one large batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import vocabulary
from kernels.cpu.library import KINDS
from models.heads.base import Head
from models.layers import GatedMLP, Linear
from models.targets.llama import LlamaTarget
from train.data.sequences import Batch
from train.features.online import Features
from train.objective_config import ObjectiveConfig
from train.objectives import alignment
from train.objectives import teacher as teaching
from train.objectives.draft_states import draft_states
from train.objectives.losses.functions import agreement, overlap, slot_losses
from train.objectives.losses.fused import chunked_sums
from train.objectives.losses.narrow import NarrowWeights, is_plain
from train.objectives.teacher import Teacher

NATIVE_LOSSES = ("kl", "ce", "label")


class StepSums(NamedTuple):
    """Sums over the slots of each step, `[K]` each; a mean is a sum over `count`, of any number of batches together."""

    count: Tensor
    loss: Tensor
    correct: Tensor  # draft's argmax == the target's, over the full vocabulary
    overlap: Tensor  # Σ_v min(p, q) over the full vocabulary


class Objective(nn.Module):
    """Holds the head, so that a distributed wrapper around this module sees every parameter's use."""

    def __init__(self, head: Head, config: Any) -> None:
        super().__init__()
        assert isinstance(config, ObjectiveConfig)
        self.head = head
        self.config = config
        steps = config.steps or head.config.max_depth
        assert steps is not None, "a head without a number of depths needs objective.steps"
        self.steps: int = steps
        self._narrow = NarrowWeights()
        if config.checkpointing:
            for module in head.modules():
                if isinstance(module, GatedMLP):  # attention keeps the keys of earlier steps, and must not run twice
                    module.forward = partial(checkpoint, module.forward, use_reentrant=False)

    @property
    def trained(self) -> nn.Module:
        """What holds every trained parameter, and is saved."""
        return self.head

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What is trained, in the order of `trained`; `scale` is a group's share of the step size."""
        return [{"params": [own for own in self.head.parameters() if own.requires_grad], "scale": 1.0}]

    @property
    def fused(self) -> bool:
        """Whether logits and the teacher's probabilities exist for a chunk of slots alone."""
        if self.config.fused is not None:
            return self.config.fused
        return next(self.head.parameters()).device.type == "cuda"

    @property
    def native(self) -> bool:
        """Whether LM head and loss are one kernel (kernels/vocabulary.py), for which the teacher's logits are kept."""
        parameter = next(self.head.parameters())
        return (
            self.config.fused is None
            and self.loss in NATIVE_LOSSES
            and vocabulary.supported(parameter.device, parameter.dtype)
            and all(is_plain(self.head.lm_head_at(depth)) for depth in range(self.steps))
        )

    def teach(self, target: LlamaTarget, hidden: Tensor, batch: Batch) -> Teacher:
        """What this objective reads of the target, from its last hidden states `[B, T, H]`."""
        if self.native and hidden.dtype in KINDS:
            return teaching.teach_logits(target, hidden, batch, self.head.target_ids)
        return teaching.teach(target, hidden, batch, self.head.target_ids, keep=not self.fused)

    @property
    def loss(self) -> str:
        """Of the logits, as losses.slot_losses has it."""
        return "kl"

    def share(self, teacher: Teacher) -> Tensor:
        """`[N]`: what a slot's loss of the logits counts, one by default."""
        return torch.ones_like(teacher.mass)

    def logit_costs(self, logits: Tensor, teacher: Teacher) -> Tensor:
        """`[N]`: that loss, of logits `[N, Vd]`."""
        return slot_losses(self.loss, logits, teacher)

    def state_costs(self, states: Tensor, teacher: Teacher) -> Tensor | None:
        """`[N]`: what the states `[N, S]` cost themselves; None if nothing."""
        return None

    def costs(self, logits: Tensor, states: Tensor, teacher: Teacher) -> Tensor:
        """`[N]`: what N slots cost; logits `[N, Vd]`, states `[N, S]`, as many rows of the teacher."""
        costs, others = self.share(teacher) * self.logit_costs(logits, teacher), self.state_costs(states, teacher)
        return costs if others is None else costs + others

    def columns(self, first: int, length: int, generator: torch.Generator) -> Sequence[Tensor] | None:
        """The slots that each depth is trained on, nested; None for all of them."""
        return None

    def denominators(self, batch: Batch) -> Tensor:
        """`[K]`: what the sum of each step is divided by, known before any forward."""
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
        progress: float = 0.0,
    ) -> tuple[Tensor, StepSums]:
        """The loss Σ_k w^k · Σ cost_k / denominators[k], and sums to log: `correct`, `overlap` only with `metrics`.

        `denominators [K]` are of everything that one optimiser step sees. `generator` draws what is random in training;
        without one, as in evaluation, nothing is. `progress`: the share of the run that is done, for objectives that
        train in stages; 0 asks for the head alone.
        """
        self._narrow.renew()
        masks = alignment.step_masks(batch.assistant, self.steps)  # [K, B, T]
        weights, _ = slot_weights(masks, self.config.reduction, batch.starts)
        length = masks.shape[2]
        first = int(masks[0].any(0).int().argmax())
        # Slot i at step k is taught by the row of served slot i + k: rows are numbered in slot order.
        number = masks[0].flatten().cumsum(0).view_as(masks[0]) - 1
        aux = features.aux if generator is None else self._noisy(features.aux, generator)
        columns = None if generator is None else self.columns(first, length, generator)
        slots = alignment.served_slots(masks[0]) if columns is None else None
        sums, total = [], batch.ids.new_zeros((), dtype=torch.float32)
        states = draft_states(self.head, batch.ids, aux, self.steps, first, columns, batch.starts, slots)
        for step, state in enumerate(states):
            kept = slots if columns is None else columns[step]
            assert kept is not None
            mask, weight = alignment.at(masks[step], kept), alignment.at(weights[step], kept)
            rows = alignment.at(alignment.shift_left(number, step), kept)[mask]
            parts = self.compare(state[mask], weight[mask], rows, teacher, step, metrics)
            # a sample of the slots stands for all of them
            share = 1.0 if columns is None else max(1, len(kept)) / (length - first)
            total = total + self.config.step_weight**step / share * parts[0] / denominators[step].clamp(min=1)
            sums.append(torch.stack([mask.sum().float(), *(value.detach() for value in parts[1:])]))
        return total, StepSums(*torch.stack(sums, dim=1))

    def _noisy(self, aux: Sequence[Tensor], generator: torch.Generator) -> Sequence[Tensor]:
        """U(-a, a) on every feature, against drafts that go wrong in small steps (arXiv 2401.15077)."""
        a = self.config.feature_noise
        if not a:
            return aux
        return [
            feature + a * (2 * torch.rand(feature.shape, generator=generator, device=feature.device) - 1)
            for feature in aux
        ]

    def compare(
        self, states: Tensor, weights: Tensor, rows: Tensor, teacher: Teacher, depth: int, metrics: bool
    ) -> tuple[Tensor, ...]:
        """Sums of weighted cost, cost, correct and overlap over the slots `states [N, S]`, taught by `rows [N]`."""
        size = max(1, teaching.CHUNK_ELEMENTS // self.head.config.draft_vocab_size)
        if teacher.logits is not None and self.native:
            return self._compare_native(states, weights, teacher.rows(rows), depth, metrics)
        if self.fused:
            compare = partial(self._compare_chunk, teacher=teacher, depth=depth, metrics=metrics)
            return chunked_sums(compare, states, weights, rows, size, self.head.parameters())
        if len(states) <= size:
            return self._compare_chunk(states, weights, rows, teacher, depth, metrics)
        # Logits of every step together would not fit: each chunk's are computed again in the backward pass.
        parts = [
            checkpoint(self._compare_chunk, part, weight, index, teacher, depth, metrics, use_reentrant=False)
            for part, weight, index in zip(states.split(size), weights.split(size), rows.split(size), strict=True)
        ]
        return tuple(torch.stack(column).sum(0) for column in zip(*parts, strict=True))

    def _compare_native(
        self, states: Tensor, weights: Tensor, teacher: Teacher, depth: int, metrics: bool
    ) -> tuple[Tensor, ...]:
        assert teacher.logits is not None
        x, weight = self.head.before_lm_head(states, depth), cast(Linear, self.head.lm_head_at(depth)).weight
        label = {"kl": None, "ce": teacher.draft_choice, "label": teacher.label}[self.loss]
        share = self.share(teacher)
        costs = vocabulary.linear_loss(
            x, weight, weights * share, *teacher.logits, label, narrow=self._narrow(weight), overlap=metrics
        )
        others = self.state_costs(states.float(), teacher)
        loss, cost = costs.total, (share * costs.cost).sum()
        if others is not None:
            loss, cost = loss + (others * weights).sum(), cost + others.detach().sum()
        if not metrics:
            return loss, cost, cost.new_zeros(()), cost.new_zeros(())
        assert costs.overlap is not None
        correct = (costs.best == teacher.draft_choice) & teacher.in_vocab
        return loss, cost, correct.sum().float(), costs.overlap.sum()

    def _compare_chunk(
        self, states: Tensor, weights: Tensor, rows: Tensor, teacher: Teacher, depth: int, metrics: bool
    ) -> tuple[Tensor, ...]:
        teacher = teacher.rows(rows).whole()
        logits = self.head.logits(states, depth).float()  # [N, Vd]
        with in_fp32(logits.device.type):
            costs = self.costs(logits, states.float(), teacher)
            zero = costs.new_zeros(())
            if not metrics:
                return (costs * weights).sum(), costs.sum(), zero, zero
            with torch.no_grad():
                correct, accepted = agreement(logits, teacher).sum().float(), overlap(logits, teacher).sum()
        return (costs * weights).sum(), costs.sum(), correct, accepted


def in_fp32(device: str) -> AbstractContextManager[Any]:
    """Autocast ends here: a probability needs more than bf16. Some devices, such as meta, know none."""
    known = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if known else contextlib.nullcontext()


def slot_weights(masks: Tensor, reduction: str, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """masks `[K, B, T]` -> what each slot counts `[K, B, T]`, and by what the sum is divided `[K]`.

    token: every slot the same. sequence: every sequence the same, however many slots it has; `starts` `[B, T]` tells
    those of a row apart.
    """
    if reduction == "token":
        return masks.float(), masks.flatten(1).sum(1).float()
    owner = torch.zeros_like(masks, dtype=torch.int64) if starts is None else starts.expand_as(masks)
    counts = torch.zeros_like(owner).scatter_add(-1, owner, masks.long())  # of a sequence, at its first slot
    return masks / counts.gather(-1, owner).clamp(min=1), (counts > 0).flatten(1).sum(1).float()
