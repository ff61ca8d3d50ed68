"""How far the distributions of one computation of a target lie from those of another: scripts/perplexity.py.

Logits come in windows `[T, V]` of a text; row i predicts token i + 1, so the last row of a window counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK = 64  # rows in fp64 at a time


@dataclass
class Scores:
    """What the windows of a text added up to."""

    losses: list[float] = field(default_factory=list)  # nats, of each token but the first of its window
    divergences: list[float] = field(default_factory=list)  # KL(reference || this), nats
    agreements: list[bool] = field(default_factory=list)  # whether both find the same token the likeliest

    @property
    def perplexity(self) -> float:
        return math.exp(math.fsum(self.losses) / len(self.losses))

    def summary(self) -> Mapping[str, float]:
        """Return perplexity, KL (mean, its standard error, 99th percentile, largest) and the share of agreements."""
        values = torch.tensor(self.divergences, dtype=torch.float64)
        return {
            "perplexity": self.perplexity,
            "kl_mean": values.mean().item(),
            "kl_error": values.std().item() / math.sqrt(len(values)),
            "kl_99": values.quantile(0.99).item(),
            "kl_largest": values.max().item(),
            "same_likeliest": sum(self.agreements) / len(self.agreements),
        }


def add_window(scores: Scores, logits: Tensor, reference: Tensor, ids: Sequence[int]) -> None:
    """Add a window with token ids `ids` of length T: logits and the reference's `[T, V]`, of any float dtype."""
    following = torch.tensor(ids[1:])
    for start in range(0, len(following), CHUNK):
        rows = slice(start, min(start + CHUNK, len(following)))
        ours, theirs = (each[rows].double().log_softmax(-1) for each in (logits, reference))
        scores.losses += (-ours.gather(1, following[rows, None])[:, 0]).tolist()
        scores.divergences += (theirs.exp() * (theirs - ours)).sum(-1).tolist()
        scores.agreements += (ours.argmax(-1) == theirs.argmax(-1)).tolist()
