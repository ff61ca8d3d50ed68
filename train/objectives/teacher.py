"""The target at the positions that are drafted for: computed once per batch, read by every step of every objective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from models.targets.llama import LlamaTarget
from train import alignment
from train.data import Batch

CHUNK_ELEMENTS = 2**26  # logits held at once: 256 MB in fp32


class Teacher(NamedTuple):
    """R rows, one per served slot in slot order; a draft vocabulary of Vd tokens."""

    probs: Tensor  # [R, Vd], renormalised to the draft vocabulary; [R, 0] while they are not kept
    negentropy: Tensor  # [R], of probs
    mass: Tensor  # [R], what the draft vocabulary holds of the full distribution
    choice: Tensor  # [R], the target's argmax over the full vocabulary
    draft_choice: Tensor  # [R], the draft id of the argmax over the draft vocabulary
    in_vocab: Tensor  # bool [R], whether the two are the same token
    label: Tensor  # [R], the draft id of the token that the sequence holds there, -1 where it has none
    hidden: Tensor  # [R, H], the target's hidden state after the final norm
    make_probs: Callable[[Tensor], Tensor] | None = None  # from `hidden`, where they are not kept

    def rows(self, index: Tensor) -> Teacher:
        if len(index) == len(self.mass):  # depth 0: every row in its order, no copy needed
            return self
        return Teacher._make([*(column[index] for column in self[:-1]), self.make_probs])

    def whole(self) -> Teacher:
        """With its probabilities."""
        return self if self.make_probs is None else self._replace(probs=self.make_probs(self.hidden), make_probs=None)


@torch.no_grad()
def teach(target: LlamaTarget, hidden: Tensor, batch: Batch, ids: Tensor, *, keep: bool = True) -> Teacher:
    """`hidden [B, T, H]` after the target's final norm; `ids [Vd]`, the head's target ids.

    Logits exist for the rows that teach and a chunk at a time. With `keep` false their probabilities are dropped too,
    to be made again for the rows that are looked at (`Teacher.whole`).
    """
    where = alignment.teacher_rows(batch.assistant)
    rows = hidden[where]  # [R, H]
    vocab_size = target.config.vocab_size
    whole = ids.numel() == vocab_size
    draft_ids = torch.full((vocab_size,), -1, device=ids.device)
    draft_ids[ids] = torch.arange(ids.numel(), device=ids.device)
    label = draft_ids[alignment.shift_left(batch.ids, 1)[where]]
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    parts = []
    for chunk, labels in zip(rows.split(size), label.split(size), strict=True):
        logits = target.logits(chunk).float()
        drafted = logits if whole else logits[:, ids]
        log_mass = drafted.logsumexp(-1, keepdim=True)
        mass = (log_mass - logits.logsumexp(-1, keepdim=True)).exp().squeeze(-1)
        log_probs = drafted - log_mass
        probs = log_probs.exp()
        choice, draft_choice = logits.argmax(-1), drafted.argmax(-1)
        negentropy = torch.linalg.vecdot(probs, log_probs)
        kept = probs if keep else probs[:, :0].clone()
        parts.append((kept, negentropy, mass, choice, draft_choice, ids[draft_choice] == choice, labels, chunk))
    again = None if keep else partial(draft_probs, target, None if whole else ids)
    return Teacher._make([*(torch.cat(column) for column in zip(*parts, strict=True)), again])


@torch.no_grad()
def draft_probs(target: LlamaTarget, ids: Tensor | None, hidden: Tensor) -> Tensor:
    """`[R, H]` -> `[R, Vd]`, renormalised to the draft vocabulary `ids`, None for all."""
    logits = target.logits(hidden).float()
    return (logits if ids is None else logits[:, ids]).softmax(-1)
