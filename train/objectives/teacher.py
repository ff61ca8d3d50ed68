"""The target at the positions that are drafted for: computed once per batch, read by every step of every objective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import vocabulary
from kernels.vocabulary import TeacherLogits
from models.targets.llama import LlamaTarget
from train.data.sequences import Batch
from train.features.online import TopTokens
from train.objectives import alignment

CHUNK_ELEMENTS = 2**26  # logits held at once: 256 MB in fp32


class SharedLogits(NamedTuple):
    """Logits that are picked by row when they are read, and never copied."""

    logits: TeacherLogits  # of all rows
    rows: Tensor  # int64 [R], those meant here


class Teacher(NamedTuple):
    """R rows, one per served slot in slot order; a draft vocabulary of Vd tokens."""

    probs: Tensor  # [R, Vd], renormalised to the draft vocabulary; [R, 0] while they are not kept
    negentropy: Tensor  # [R], of probs
    mass: Tensor  # [R], what the draft vocabulary holds of the full distribution
    choice: Tensor  # [R], the target's argmax over the full vocabulary
    draft_choice: Tensor  # [R], the draft id of the argmax over the draft vocabulary
    in_vocab: Tensor  # bool [R], whether the two are the same token
    label: Tensor  # [R], the draft id of the token that the sequence holds there, -1 where it has none
    hidden: Tensor  # [R, H], the target's hidden state after the final norm; [R, 2k] of `recall`
    make_probs: Callable[[Tensor], Tensor] | None = None  # from `hidden`, where they are not kept
    logits: SharedLogits | None = None  # kept in place of probs by `teach_logits`

    def rows(self, index: Tensor) -> Teacher:
        if len(index) == len(self.mass):  # depth 0: every row in its order, no copy needed
            return self
        logits = self.logits and self.logits._replace(rows=self.logits.rows[index])
        return Teacher._make([*(column[index] for column in self[:-2]), self.make_probs, logits])

    def whole(self) -> Teacher:
        """With its probabilities."""
        return self if self.make_probs is None else self._replace(probs=self.make_probs(self.hidden), make_probs=None)


def draft_ids_of(ids: Tensor, vocab_size: int) -> Tensor:
    """The draft id of every target id `[V]`, -1 for those that `ids` `[Vd]` does not hold."""
    found = torch.full((vocab_size,), -1, device=ids.device)
    found[ids] = torch.arange(ids.numel(), device=ids.device)
    return found


@torch.no_grad()
def teach(target: LlamaTarget, hidden: Tensor, batch: Batch, ids: Tensor, *, keep: bool = True) -> Teacher:
    """`hidden [B, T, H]` after the target's final norm; `ids [Vd]`, the head's target ids.

    Logits exist for the rows that teach and a chunk at a time. With `keep` false their probabilities are dropped too,
    to be made again for the rows that are looked at (`Teacher.whole`).
    """
    rows, label, whole = rows_and_labels(target, hidden, batch, ids)
    vocab_size = target.config.vocab_size
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
    return Teacher._make([*(torch.cat(column) for column in zip(*parts, strict=True)), again, None])


def rows_and_labels(target: LlamaTarget, hidden: Tensor, batch: Batch, ids: Tensor) -> tuple[Tensor, Tensor, bool]:
    """`hidden` `[R, H]` and draft ids `[R]` of the rows that teach, and whether `ids` are the whole vocabulary."""
    where, vocab_size = alignment.teacher_rows(batch.assistant), target.config.vocab_size
    label = draft_ids_of(ids, vocab_size)[alignment.shift_left(batch.ids, 1)[where]]
    return hidden[where], label, ids.numel() == vocab_size


@torch.no_grad()
def teach_logits(target: LlamaTarget, hidden: Tensor, batch: Batch, ids: Tensor) -> Teacher:
    """As `teach`, keeping the target's logits over the draft vocabulary, in its dtype, in place of probabilities."""
    rows, label, whole = rows_and_labels(target, hidden, batch, ids)
    kept, parts = rows.new_empty(len(rows), ids.numel()), []
    for block in vocabulary.spans(len(rows), vocabulary.BLOCK_ELEMENTS // target.config.vocab_size):
        logits, choices = vocabulary.teacher_logits(target.logits(rows[block]), None if whole else ids)
        kept[block] = logits.logits
        parts.append((*logits[1:], *choices))
    log_z, negentropy, mass, choice, draft_choice = (torch.cat(column) for column in zip(*parts, strict=True))
    return Teacher(
        probs=negentropy.new_empty(len(rows), 0),
        negentropy=negentropy,
        mass=mass,
        choice=choice,
        draft_choice=draft_choice,
        in_vocab=ids[draft_choice] == choice,
        label=label,
        hidden=rows,
        logits=SharedLogits(TeacherLogits(kept, log_z, negentropy, mass), torch.arange(len(rows))),
    )


@torch.no_grad()
def draft_probs(target: LlamaTarget, ids: Tensor | None, hidden: Tensor) -> Tensor:
    """`[R, H]` -> `[R, Vd]`, renormalised to the draft vocabulary `ids`, None for all."""
    logits = target.logits(hidden).float()
    return (logits if ids is None else logits[:, ids]).softmax(-1)


@torch.no_grad()
def recall(top: TopTokens, batch: Batch, ids: Tensor, vocab_size: int) -> Teacher:
    """The teacher from its likeliest tokens alone `[B, T, k]`; what they leave over counts nothing.

    Where the draft vocabulary `ids` holds none of them, the sequence's own token stands in, as if it were certain.
    """
    where = alignment.teacher_rows(batch.assistant)
    log_probs, tokens = top.log_probs[where], top.ids[where]  # [R, k]
    draft_ids = draft_ids_of(ids, vocab_size)
    label = draft_ids[alignment.shift_left(batch.ids, 1)[where]]
    drafted = draft_ids[tokens]
    inside = torch.where(drafted >= 0, log_probs.exp(), 0.0)
    mass = inside.sum(-1)
    none = mass == 0
    probs = torch.where(none[:, None], 0.0, inside / mass.clamp(min=torch.finfo(inside.dtype).tiny)[:, None])
    drafted = drafted.clamp(min=0)
    probs[none, 0], drafted[none, 0] = 1.0, label[none].clamp(min=0)
    choice, draft_choice = tokens[:, 0], drafted.gather(1, probs.argmax(-1, keepdim=True)).squeeze(-1)
    size = ids.numel()
    return Teacher(
        probs=probs.new_zeros(len(probs), 0),
        negentropy=torch.xlogy(probs, probs).sum(-1),
        mass=mass,
        choice=choice,
        draft_choice=draft_choice,
        in_vocab=~none & (ids[draft_choice] == choice),
        label=label,
        hidden=torch.cat([probs, drafted.to(probs.dtype)], dim=-1),
        make_probs=partial(spread, size),
    )


def spread(size: int, packed: Tensor) -> Tensor:
    """Probabilities and draft ids side by side `[R, 2k]` -> `[R, size]`, zero elsewhere."""
    probs, ids = packed.chunk(2, dim=-1)
    return probs.new_zeros(len(packed), size).scatter_add(1, ids.long(), probs)
