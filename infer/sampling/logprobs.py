"""Log-probabilities of chosen tokens and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.choose import logprobs


@dataclass(frozen=True)
class TokenLogprob:
    """`rank` counts from 1: how many tokens are at least as likely. `top`: the likeliest ids, ties by lowest id."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """logits `[n, V]`, the token at each row. Row by row the same bits, whatever rows stand beside it."""
    own, rank, ids, values = (
        part.tolist() for part in logprobs(logits, torch.tensor(list(tokens), device=logits.device), top)
    )
    return [
        TokenLogprob(token, own[row], rank[row], tuple(zip(ids[row], values[row], strict=True)))
        for row, token in enumerate(tokens)
    ]
