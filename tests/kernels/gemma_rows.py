"""Rows over Gemma's vocabulary of 262,144 tokens, and the sampling keys for them in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.noise import gumbel_noise
from kernels.operands import ChoiceParameters

SIZE = 262144
ROWS = [  # temperature, top_k, top_p
    (0.0, 0, 1.0),
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (1.0, 200_000, 1.0),
    (1.2, 0, 0.9),
]


def gemma_rows(dtype: torch.dtype) -> tuple[Tensor, ChoiceParameters, Tensor, Tensor]:
    """Return logits `[5, V]` whose best columns are among the last, parameters, positions, and column ids, reversed."""
    logits = torch.randn(len(ROWS), SIZE, generator=torch.Generator().manual_seed(3)) * 2
    logits[:, -70:] += torch.linspace(8, 12, 70)
    temperature, top_k, top_p = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    seeds = torch.arange(len(ROWS)) * 7919 + 2**40
    parameters = ChoiceParameters(temperature, top_k, top_p, torch.zeros(len(ROWS)), seeds & 0xFFFFFFFF, seeds >> 32)
    return logits.to(dtype), parameters, torch.arange(len(ROWS)) + 100, torch.arange(SIZE).flip(0)


def float64_keys(logits: Tensor, parameters: ChoiceParameters, positions: Tensor, ids: Tensor) -> Tensor:
    keys = logits.double()
    for row, (temperature, top_k, top_p) in enumerate(ROWS):
        if not temperature:
            continue
        keys[row] /= temperature
        ordered = keys[row].sort(descending=True).values
        if top_k:
            keys[row, keys[row] < ordered[top_k - 1]] = -torch.inf
        if top_p < 1:
            p = ordered.softmax(-1)
            count = int((p.cumsum(-1) - p < top_p).sum())
            keys[row, keys[row] < ordered[count - 1]] = -torch.inf
        index = slice(row, row + 1)
        keys[row] += gumbel_noise(parameters.seed_low[index], parameters.seed_high[index], positions[index], ids)[0]
    return keys


def ranked(keys: Tensor) -> Tensor:
    """Return the columns by descending key; ties go to the lowest column."""
    return keys.sort(dim=-1, descending=True, stable=True).indices
