"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def token_logprobs(logits: Iterable[Tensor], tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprob]:
    """Return the log-probability of each row's token, and of the `tops[row]` most likely ones, by one read.

    logits: parts `[n, V]` of all rows, one at a time, so that no more than one needs memory. tokens `[R]`, on their
    device. A row's bits depend neither on other rows nor on how many most likely ones are found for them.
    """
    if not tops:  # of a prompt of one token
        return []
    most, parts, first = max(tops), list[Tensor](), 0
    for part in logits:
        chosen, rank, ids, values = logprobs(part, tokens[first : first + len(part)], most)
        parts.append(torch.cat([rank[:, None].double(), chosen[:, None].double(), ids.double(), values.double()], 1))
        first += len(part)
    rows = torch.cat([tokens[:, None].double(), torch.cat(parts)], 1).tolist()  # fp64 holds ids and fp32 exactly
    return [
        TokenLogprob(
            int(token), chosen, int(rank), tuple(zip(map(int, best[:top]), best[most : most + top], strict=True))
        )
        for (token, rank, chosen, *best), top in zip(rows, tops, strict=True)
    ]
