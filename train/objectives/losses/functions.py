"""Losses of a draft's logits against the target's distribution: one value per slot, as pure functions.

p is the target's distribution, q the draft's, both over the draft vocabulary; p~ is p renormalized to it. A drafted
token is accepted with probability Σ min(p, q), which the losses of arXiv 2602.23881 (tv, lk, lk_hybrid) optimise
directly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from train.objectives.teacher import Teacher


def slot_losses(loss: str, logits: Tensor, teacher: Teacher) -> Tensor:
    """Return the loss `[N]` of logits `[N, Vd]` against N rows of the teacher.

    kl: KL(p~ || q). ce: cross-entropy with the target's argmax in the draft vocabulary. label: cross-entropy with the
    sequence's token; 0 where it is outside the draft vocabulary. tv: 1 - Σ min(p, q). lk: -log Σ min(p, q). lk_hybrid:
    λ kl + (1 - λ) tv with λ = exp(-Σ min(p, q)), per slot and detached: KL while the draft is poor.
    """
    if loss == "ce":
        return F.cross_entropy(logits, teacher.draft_choice, reduction="none")
    if loss == "label":
        return F.cross_entropy(logits, teacher.label, reduction="none", ignore_index=-1)
    if loss == "kl":
        return SoftCrossEntropy.apply(logits, teacher.probs) + teacher.negentropy
    accepted = overlap(logits, teacher)
    if loss == "tv":
        return 1 - accepted
    if loss == "lk":
        return -accepted.clamp(min=torch.finfo(accepted.dtype).tiny).log()
    assert loss == "lk_hybrid"
    share = (-accepted.detach()).exp()
    return share * slot_losses("kl", logits, teacher) + (1 - share) * (1 - accepted)


def overlap(logits: Tensor, teacher: Teacher) -> Tensor:
    """Return Σ_v min(p, q) over the full vocabulary, `[N]`."""
    return torch.minimum(logits.softmax(-1), teacher.probs * teacher.mass[:, None]).sum(-1)


def agreement(logits: Tensor, teacher: Teacher) -> Tensor:
    """Return whether the draft's argmax is the target's over the full vocabulary, bool `[N]`."""
    return (logits.argmax(-1) == teacher.draft_choice) & teacher.in_vocab


class SoftCrossEntropy(torch.autograd.Function):
    """`-Σ_v p_v log softmax(z)_v` per row, for rows of p that sum to one. Saves only z and p of that size."""

    @staticmethod
    def forward(ctx, logits: Tensor, probs: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        log_z = logits.logsumexp(-1)
        ctx.save_for_backward(logits, log_z, probs)
        return log_z - torch.linalg.vecdot(probs, logits)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        logits, log_z, probs = ctx.saved_tensors
        return (logits - log_z[:, None]).exp_().sub_(probs).mul_(grad[:, None]), None
