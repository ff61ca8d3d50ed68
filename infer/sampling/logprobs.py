"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.choose import logprobs


@dataclass(frozen=True)
class TokenLogprob:
    """`rank`: the number of tokens at least as likely, from 1. `top`: the most likely ids, ties by lowest id."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probability of each row's token. logits `[n, V]`; a row's bits do not depend on other rows."""
    chosen, rank, ids, values = (
        part.tolist() for part in logprobs(logits, torch.tensor(list(tokens), device=logits.device), top)
    )
    return [
        TokenLogprob(token, chosen[row], rank[row], tuple(zip(ids[row], values[row], strict=True)))
        for row, token in enumerate(tokens)
    ]
