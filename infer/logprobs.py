"""Log-probabilities of chosen tokens and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """`rank` counts from 1: how many tokens are at least as likely. `top`: the likeliest ids, ties by lowest id."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """logits `[n, V]`, the token at each row. Row by row the same bits, whatever rows stand beside it."""
    log_p = logits.float().log_softmax(-1)
    chosen = torch.tensor(list(tokens), device=logits.device)[:, None]
    own = log_p.gather(1, chosen)
    rank = (log_p > own).sum(1) + 1
    best = log_p.sort(dim=-1, descending=True, stable=True) if top else None
    answers = []
    for row, token in enumerate(tokens):
        likeliest: tuple[tuple[int, float], ...] = ()
        if best is not None:
            ids, values = best.indices[row, :top].tolist(), best.values[row, :top].tolist()
            likeliest = tuple(zip(ids, values, strict=True))
        answers.append(TokenLogprob(token, float(own[row]), int(rank[row]), likeliest))
    return answers
