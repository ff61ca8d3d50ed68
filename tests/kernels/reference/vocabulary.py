"""Reference of the loss over the vocabulary, unblocked in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_loss(
    x: Tensor, weight: Tensor, probs: Tensor, mass: Tensor, label: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x `[N, S]` through weight `[V, S]` against rows of probs `[N, V]`: cost and overlap `[N]`, differentiable.

    The cost is KL(probs || softmax), or with `label` `[N]` the cross-entropy with these columns, 0 for negative labels.
    """
    logits = x.double() @ weight.double().T
    log_q, p = logits.log_softmax(-1), probs.double()
    overlap = torch.minimum(log_q.exp(), p * mass.double()[:, None]).sum(-1)
    if label is not None:
        picked = log_q.gather(1, label.clamp(min=0)[:, None]).squeeze(1)
        return torch.where(label >= 0, -picked, 0.0), overlap
    surprise = (p * log_q.where(p > 0, 0.0)).sum(-1)
    return torch.xlogy(p, p).sum(-1) - surprise, overlap
