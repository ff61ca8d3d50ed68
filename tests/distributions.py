"""The textbook distribution of a sampled token, and how far observed counts may deviate from a distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Z = 4.5  # the bound on a chi-square statistic, in its standard deviations: one false alarm in some 100,000 tests


def sampling_probs(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return p' `[V]` in float64: temperature, min-p, top-k, then top-p of the rest, by sorting and cutting."""
    p = (logits.double() / temperature).softmax(-1)
    ordered, index = p.sort(descending=True)
    keep = torch.ones_like(p, dtype=torch.bool)
    keep[index[ordered < min_p * ordered[0]]] = False
    if top_k:
        keep[index[top_k:]] = False
    if top_p < 1:
        remaining = ordered * keep[index]
        before = (remaining / remaining.sum()).cumsum(0) - remaining / remaining.sum()
        keep[index[before >= top_p]] = False
    p = p * keep
    return p / p.sum()


def chi_square_excess(counts: Tensor, probs: Tensor) -> float:
    """Return (chi-square statistic - degrees of freedom) / its standard deviation, with small cells merged.

    Infinite if something was counted that has probability zero.
    """
    if counts[probs == 0].any():
        return math.inf
    expected = probs.double() * counts.sum()
    order = expected.argsort()
    counts, expected = counts.double()[order], expected[order]
    cell = (expected.cumsum(0) / 10).floor().clamp(max=max(0.0, float(expected.sum()) // 10 - 1)).long()
    size = int(cell.max()) + 1
    observed = torch.zeros(size, dtype=torch.double).index_add_(0, cell, counts)
    expected_cells = torch.zeros(size, dtype=torch.double).index_add_(0, cell, expected)
    keep = expected_cells > 0
    statistic = float(((observed - expected_cells)[keep] ** 2 / expected_cells[keep]).sum())
    freedom = int(keep.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * max(freedom, 1))
