"""Whether a head drafts better than another on the same examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from infer.request import SpeculationStats
from models.heads.base import Head
from train.evaluation import Sampling, simulate
from train.learning.examples import Example, batch_of

MOST_LOST = 0.01  # of the acceptance length on a replay, whose single kinds may lose three times as much


class Comparison(NamedTuple):
    """Acceptance lengths of the head in use and of a candidate."""

    before: float
    after: float
    error: float  # standard error of their difference
    # on held-back sequences of the head's first training: of the head that learning began with, and of the candidate
    replay: tuple[float, float] | None = None

    @property
    def forgets(self) -> bool:
        return self.replay is not None and self.replay[1] < (1 - MOST_LOST) * self.replay[0]

    @property
    def better(self) -> bool:
        return self.after - self.before > self.error and not self.forgets

    @property
    def worse(self) -> bool:
        return self.before - self.after > self.error or self.forgets


def accepted(head: Head, examples: Iterable[Example], steps: int) -> list[SpeculationStats]:
    """Return what the engine would accept of each example, sampled or not, with chains of `steps` tokens."""
    counts = []
    for example in examples:
        batch, features = batch_of([example], head.config.aux_layers)
        sampling = Sampling(example.temperature, [example.seed], example.first) if example.temperature else None
        counts.append(simulate(head, batch, features, steps, sampling))
    return counts


def compared(before: Sequence[SpeculationStats], after: Sequence[SpeculationStats]) -> Comparison:
    """Compare two heads by their counts of the same examples, two at least.

    τ is a ratio of sums over the examples. The error is that of the difference of two such ratios, by the delta
    method; an example counts in both, so what makes it easy or hard for both does not.
    """
    emitted, old, new = (
        torch.tensor(numbers, dtype=torch.float64)
        for numbers in ([s.emitted for s in before], [s.steps for s in before], [s.steps for s in after])
    )
    tau_before, tau_after = emitted.sum() / old.sum(), emitted.sum() / new.sum()
    gains = (emitted - tau_after * new) / new.mean() - (emitted - tau_before * old) / old.mean()
    error = (gains.square().sum() / (len(gains) * (len(gains) - 1))).sqrt()
    return Comparison(float(tau_before), float(tau_after), float(error))
