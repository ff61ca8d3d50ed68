"""The teacher: the target's output at the positions to be drafted, computed once per batch and shared by all steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import vocabulary
from kernels.linear import PackedLinear
from kernels.vocabulary import TeacherLogits
from models.layers import Linear
from models.targets.llama import LlamaTarget
from train.data import alignment
from train.data.sequences import Batch
from train.features.online import TopTokens, WholeVocabulary

CHUNK_ELEMENTS = 2**26  # logits in memory at a time: 256 MB in fp32


class SharedLogits(NamedTuple):
    """Teacher logits that are indexed by row when read, never copied."""

    logits: TeacherLogits  # of all rows
    rows: Tensor  # int64 [R], the selected ones


class Teacher(NamedTuple):
    """What a draft is compared with: R rows, one per served slot in slot order; a draft vocabulary of Vd tokens."""

    probs: Tensor  # [R, Vd], renormalized to the draft vocabulary; [R, 0] if not kept
    negentropy: Tensor  # [R], of probs
    mass: Tensor  # [R], probability of the draft vocabulary under the full distribution
    choice: Tensor  # [R], the target's argmax over the full vocabulary
    draft_choice: Tensor  # [R], the draft id of the argmax over the draft vocabulary
    in_vocab: Tensor  # bool [R], whether the two are the same token
    label: Tensor  # [R], the draft id of the sequence's token, -1 if it has none
    hidden: Tensor  # [R, H], the target's hidden state after the final norm; [R, 2k] of `recall`
    make_probs: Callable[[Tensor], Tensor] | None = None  # computes probs from `hidden` where they are not kept
    logits: SharedLogits | None = None  # kept in place of probs by `teach_logits`

    def rows(self, index: Tensor) -> Teacher:
        if len(index) == len(self.mass):  # depth 0: every row in its order, no copy needed
            return self
        logits = self.logits and self.logits._replace(rows=self.logits.rows[index])
        return Teacher._make([*(column[index] for column in self[:-2]), self.make_probs, logits])

    def whole(self) -> Teacher:
        """Return this teacher with its probabilities computed."""
        return self if self.make_probs is None else self._replace(probs=self.make_probs(self.hidden), make_probs=None)


def draft_ids_of(ids: Tensor, vocab_size: int) -> Tensor:
    """Return the draft id of every target id, `[V]`; -1 for those outside the draft vocabulary `ids` `[Vd]`."""
    draft_ids = torch.full((vocab_size,), -1, device=ids.device)
    draft_ids[ids] = torch.arange(ids.numel(), device=ids.device)
    return draft_ids


@torch.no_grad()
def teach(target: LlamaTarget, hidden: Tensor, batch: Batch, ids: Tensor, *, keep: bool = True) -> Teacher:
    """Compute the teacher from `hidden [B, T, H]` after the target's final norm; `ids [Vd]` are the head's target ids.

    Logits are computed only for teacher rows, one chunk at a time. With `keep` false the probabilities are dropped too
    and recomputed for the rows that are read (`Teacher.whole`).
    """
    rows, label, full_vocab = rows_and_labels(target, hidden, batch, ids)
    vocab_size = target.config.vocab_size
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    parts = []
    for chunk, labels in zip(rows.split(size), label.split(size), strict=True):
        logits = target.logits(chunk)
        drafted = logits if full_vocab else logits[:, ids]
        log_mass = drafted.logsumexp(-1, keepdim=True)
        mass = (log_mass - logits.logsumexp(-1, keepdim=True)).exp().squeeze(-1)
        log_probs = drafted - log_mass
        probs = log_probs.exp()
        choice, draft_choice = logits.argmax(-1), drafted.argmax(-1)
        negentropy = torch.linalg.vecdot(probs, log_probs)
        kept = probs if keep else probs[:, :0].clone()
        parts.append((kept, negentropy, mass, choice, draft_choice, ids[draft_choice] == choice, labels, chunk))
    make_probs = None if keep else partial(draft_probs, target, None if full_vocab else ids)
    return Teacher._make([*(torch.cat(column) for column in zip(*parts, strict=True)), make_probs, None])


def rows_and_labels(target: LlamaTarget, hidden: Tensor, batch: Batch, ids: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return `hidden` `[R, H]` and label draft ids `[R]` of teacher rows, and whether `ids` is the full vocabulary."""
    where, vocab_size = alignment.teacher_rows(batch.assistant), target.config.vocab_size
    label = draft_ids_of(ids, vocab_size)[alignment.shift_left(batch.ids, 1)[where]]
    return hidden[where], label, ids.numel() == vocab_size


def whole_vocabulary(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp, fp32, and argmax of logits `[R, V]`, `[R]` each."""
    if not vocabulary.supported(logits.device, logits.dtype):
        return logits.float().logsumexp(-1), logits.argmax(-1)
    taught, choices = vocabulary.teacher_logits(logits, None)
    return taught.log_z, choices.choice


def drafted_rows(target: LlamaTarget, ids: Tensor) -> PackedLinear | None:
    """Return the LM head's product with the rows `ids`, whose logits have the same bits; None where it has no copy."""
    weight = target.lm_head.unpacked_weight() if type(target.lm_head) is Linear else None
    if weight is None or target.lm_head.packed is None or weight.shape[1] != target.config.hidden_size:
        return None  # in fewer bits, divided, or behind a projection of its own
    return PackedLinear(weight[ids], out_dtype=target.lm_head.out_dtype)


@torch.no_grad()
def teach_logits(
    target: LlamaTarget,
    hidden: Tensor,
    batch: Batch,
    ids: Tensor,
    whole: WholeVocabulary | None = None,
    drafted: PackedLinear | None = None,
) -> Teacher:
    """Like `teach`, but keep the target's logits over the draft vocabulary instead of probabilities.

    With `whole` and the LM head's `drafted` rows only these logits are computed.
    """
    rows, label, full_vocab = rows_and_labels(target, hidden, batch, ids)
    where = alignment.teacher_rows(batch.assistant)
    if whole is not None and drafted is not None and whole.log_z[where].all():  # 0: no engine has computed logits there
        scaling, logits = target.config.logits_scaling, drafted(rows)
        logits, choices = vocabulary.teacher_logits(logits if scaling == 1 else logits / scaling, None)
        kept, log_z, negentropy, _ = logits
        mass, choice, draft_choice = (log_z - whole.log_z[where]).exp(), whole.choice[where], choices.choice
    else:
        kept, parts = rows.new_empty(len(rows), ids.numel(), dtype=torch.float32), []
        for block in vocabulary.spans(len(rows), vocabulary.BLOCK_ELEMENTS // target.config.vocab_size):
            logits, choices = vocabulary.teacher_logits(target.logits(rows[block]), None if full_vocab else ids)
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
    """Return probabilities `[R, Vd]` over the draft vocabulary `ids` (None for all), renormalized, from `[R, H]`."""
    logits = target.logits(hidden)
    return (logits if ids is None else logits[:, ids]).softmax(-1)


@torch.no_grad()
def recall(top: TopTokens, batch: Batch, ids: Tensor, vocab_size: int) -> Teacher:
    """Build the teacher from the target's stored top-k tokens `[B, T, k]`; the remaining probability mass is ignored.

    Where the draft vocabulary `ids` holds none of them, the sequence's token is used with probability one.
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
    """Scatter packed probabilities and draft ids `[R, 2k]` into dense probabilities `[R, size]`, zero elsewhere."""
    probs, ids = packed.chunk(2, dim=-1)
    return probs.new_zeros(len(packed), size).scatter_add(1, ids.long(), probs)
