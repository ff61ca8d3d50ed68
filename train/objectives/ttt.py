"""EAGLE-3's training-time test (arXiv 2503.01840): the head runs K steps on its own states, as in serving.

Tokens are teacher-forced, states are the head's own; every step is compared with the target's distribution at the
same position. `draft_states` is also what simulated acceptance walks (train/acceptance.py). Only served slots are
computed where that is possible: K/V of a prompt is needed at step 0, its outputs never.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.attention import TrainingTimeTestAttention
from models.heads.eagle3 import Eagle3Head
from models.targets.llama import LlamaTarget
from models.vocab import target_ids
from train import alignment
from train.config import ObjectiveConfig
from train.data import Batch
from train.features import Features

CHUNK_ELEMENTS = 2**26  # logits held at once: 256 MB in fp32


class Teacher(NamedTuple):
    """The target at the R positions that are drafted for, over the draft vocabulary. Every step reads the same rows."""

    probs: Tensor  # [R, Vd], renormalised to the draft vocabulary
    negentropy: Tensor  # [R], of probs
    mass: Tensor  # [R], what the draft vocabulary holds of the full distribution
    choice: Tensor  # [R], the target's argmax over the full vocabulary
    draft_choice: Tensor  # [R], the draft id of the argmax over the draft vocabulary
    in_vocab: Tensor  # bool [R], whether the two are the same token


class StepSums(NamedTuple):
    """Sums over the slots of each step, `[K]` each; a mean is a sum over `count`, of any number of batches together."""

    count: Tensor
    loss: Tensor
    correct: Tensor  # draft's argmax == the target's, over the full vocabulary
    overlap: Tensor  # Σ_v min(p, q) over the full vocabulary


def slot_counts(assistant: Tensor, steps: int) -> Tensor:
    """`[K]` slots of each step: the denominators of the loss, known before any forward."""
    return alignment.step_masks(assistant, steps).flatten(1).sum(1)


@torch.no_grad()
def teach(target: LlamaTarget, hidden: Tensor, assistant: Tensor, d2t: Tensor) -> Teacher:
    """`hidden [B, T, H]` after the target's final norm. Logits exist for the rows that teach and a chunk at a time."""
    rows = hidden[alignment.teacher_rows(assistant)]  # [R, H]
    ids = target_ids(d2t)
    whole = ids.numel() == target.config.vocab_size
    parts = []
    for chunk in rows.split(max(1, CHUNK_ELEMENTS // target.config.vocab_size)):
        logits = target.logits(chunk).float()
        drafted = logits if whole else logits[:, ids]
        log_mass = drafted.logsumexp(-1, keepdim=True)
        mass = (log_mass - logits.logsumexp(-1, keepdim=True)).exp().squeeze(-1)
        log_probs = drafted - log_mass
        probs = log_probs.exp()
        choice, draft_choice = logits.argmax(-1), drafted.argmax(-1)
        parts.append(Teacher(probs, row_dot(probs, log_probs), mass, choice, draft_choice, ids[draft_choice] == choice))
    return Teacher(*(torch.cat(column) for column in zip(*parts, strict=True)))


def draft_states(head: Eagle3Head, ids: Tensor, aux: Sequence[Tensor], steps: int, first: int = 0) -> Iterator[Tensor]:
    """What the head answers at steps 0 .. K-1 for slots `first ..`: `[B, T - first, H]` each. `head.logits` reads them.

    ids `[B, T]`, aux one `[B, T, Ht]` per feature. Slots before `first` lend their keys at step 0 and stop there.
    """
    length, attention = ids.shape[1], TrainingTimeTestAttention()
    dtype = head.norm.weight.dtype
    state = head.fuse([feature.to(dtype) for feature in aux]).to(dtype)  # under autocast the residual stays fp32
    for step in range(steps):
        attention.begin_step(step)
        tokens = alignment.draft_tokens(ids, step)
        positions = alignment.draft_positions(length, step, ids.device).expand_as(ids)
        if step == 0:
            state = head.step(tokens, state, positions, attention)[:, first:]
        else:
            state = head.step(tokens[:, first:], state, positions[:, first:], attention)
        yield state


class TrainingTimeTest(nn.Module):
    """Holds the head, so that a distributed wrapper around this module sees every parameter's use."""

    def __init__(self, head: Eagle3Head, config: ObjectiveConfig) -> None:
        super().__init__()
        self.head = head
        self.config = config

    def forward(
        self, batch: Batch, features: Features, teacher: Teacher, denominators: Tensor, metrics: bool = True
    ) -> tuple[Tensor, StepSums]:
        """The loss Σ_k w^k · Σ loss_k / denominators[k], and sums to log: `correct`, `overlap` only with `metrics`.

        `denominators [K]` count the slots of everything that one optimiser step sees, so that accumulated and
        distributed batches add up to the loss of one large batch.
        """
        masks = alignment.step_masks(batch.assistant, self.config.steps)  # [K, B, T]
        first = int(masks[0].any(0).int().argmax())
        # Slot i at step k is taught by the row of served slot i + k: rows are numbered in slot order.
        number = masks[0].flatten().cumsum(0).view_as(masks[0]) - 1
        sums, total = [], batch.ids.new_zeros((), dtype=torch.float32)
        states = draft_states(self.head, batch.ids, features.aux, self.config.steps, first)
        for step, state in enumerate(states):
            mask = masks[step]
            rows = alignment.shift_left(number, step)[mask]
            step_sums = self._compare(state[mask[:, first:]], rows, teacher, metrics)
            total = total + self.config.step_weight**step * step_sums[0] / denominators[step].clamp(min=1)
            sums.append(torch.stack([mask.sum().float(), *(value.detach() for value in step_sums)]))
        return total, StepSums(*torch.stack(sums, dim=1))

    def _compare(self, states: Tensor, rows: Tensor, teacher: Teacher, metrics: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of loss, correct and overlap over the slots `states [N, H]`, taught by `rows [N]` of the teacher."""
        size = max(1, CHUNK_ELEMENTS // self.head.config.draft_vocab_size)
        if len(states) <= size:
            return self._compare_chunk(states, rows, teacher, metrics)
        # Logits of every step together would not fit: each chunk's are computed again in the backward pass.
        parts = [
            checkpoint(self._compare_chunk, part, index, teacher, metrics, use_reentrant=False)
            for part, index in zip(states.split(size), rows.split(size), strict=True)
        ]
        loss, correct, overlap = (torch.stack(column).sum(0) for column in zip(*parts, strict=True))
        return loss, correct, overlap

    def _compare_chunk(
        self, states: Tensor, rows: Tensor, teacher: Teacher, metrics: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.head.logits(states).float()  # [N, Vd]
        everything = len(rows) == len(teacher.mass)  # step 0: the rows in their order, no copy needed
        probs = teacher.probs if everything else teacher.probs[rows]
        with torch.autocast(logits.device.type, enabled=False):  # a probability needs more than bf16
            if self.config.loss == "ce":
                losses = F.cross_entropy(logits, teacher.draft_choice[rows], reduction="none")
            else:
                losses = SoftCrossEntropy.apply(logits, probs) + teacher.negentropy[rows]  # = KL(p || q)
            if self.config.drop_out_of_vocab:
                losses = losses * teacher.in_vocab[rows]
            zero = losses.new_zeros(())
            if not metrics:
                return losses.sum(), zero, zero
            with torch.no_grad():
                correct = (logits.argmax(-1) == teacher.draft_choice[rows]) & teacher.in_vocab[rows]
                overlap = torch.minimum(logits.softmax(-1), probs * teacher.mass[rows, None]).sum()
        return losses.sum(), correct.sum().float(), overlap


class SoftCrossEntropy(torch.autograd.Function):
    """`-Σ_v p_v log softmax(z)_v` per row, for rows of p that sum to one. Keeps z and p, nothing else of their size."""

    @staticmethod
    def forward(ctx, logits: Tensor, probs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        log_z = logits.logsumexp(-1)
        ctx.save_for_backward(logits, log_z, probs)
        return log_z - row_dot(probs, logits)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        logits, log_z, probs = ctx.saved_tensors
        return (logits - log_z[:, None]).exp_().sub_(probs).mul_(grad[:, None]), None


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b)
