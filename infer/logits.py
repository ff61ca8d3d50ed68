"""Penalties, bias and masks: the logits of a row after everything that depends on that row's own prefix.

A row's prefix is the request's tokens and, down a draft, the drafted tokens on the row's path. So a drafted token is
counted for the rows below it and for no other, and rows of a tree get what plain decoding would give them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from infer.params import SamplingParams, pairs

FORBIDDEN = float("-inf")


class TokenCounts:
    """How often each token stands in a request's prompt and output; kept up with the request, not recounted."""

    def __init__(self, vocab_size: int, prompt: Sequence[int], device: torch.device) -> None:
        self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt[torch.tensor(list(prompt), device=device)] = True
        self.output = torch.zeros(vocab_size, device=device)
        self._counted = len(prompt)

    def update(self, tokens: Sequence[int]) -> None:
        """`tokens`, prompt and output, extends that of the last call."""
        new = torch.tensor(list(tokens[self._counted :]), dtype=torch.int64, device=self.output.device)
        self.output.index_add_(0, new, torch.ones(len(new), device=self.output.device))
        self._counted = len(tokens)


def shape_logits(
    logits: Tensor,
    params: SamplingParams,
    counts: TokenCounts | None,
    tokens: Sequence[int],
    output_length: int,
    paths: Sequence[Sequence[int]],
    stop_ids: Collection[int],
) -> Tensor:
    """logits `[n, V]` of one request's rows -> the shaped ones, fp32.

    `paths[i]`: the drafted tokens on row i's path, the root not counted. `tokens`: prompt and output up to the root,
    of which the last `output_length` are output. `counts` is needed for penalties; `stop_ids` for `min_tokens`.
    """
    logits = logits.float().clone()
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        assert counts is not None
        logits = penalise(logits, params, counts, paths)
    if params.logit_bias:
        ids, values = zip(*pairs(params.logit_bias), strict=True)
        bias = torch.tensor(values, dtype=torch.float32, device=logits.device)
        logits.index_add_(1, torch.tensor(ids, device=logits.device), bias.expand(len(logits), -1))
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
        kept = logits[:, allowed]
        logits.fill_(FORBIDDEN)
        logits[:, allowed] = kept
    for row, path in enumerate(paths):
        banned = [word[-1] for word in params.bad_words if ends_with(tokens, path, word[:-1])]
        if output_length + len(path) < params.min_tokens:
            banned += stop_ids
        if banned:
            logits[row, torch.tensor(banned, device=logits.device)] = FORBIDDEN
    return logits


def penalise(logits: Tensor, params: SamplingParams, counts: TokenCounts, paths: Sequence[Sequence[int]]) -> Tensor:
    output = counts.output.repeat(len(paths), 1)  # [n, V]
    for row, path in enumerate(paths):
        if path:
            drafted = torch.tensor(list(path), device=logits.device)
            output[row].index_add_(0, drafted, torch.ones(len(path), device=logits.device))
    present = output > 0
    if params.repetition_penalty != 1:  # as in CTRL (arXiv 1909.05858): towards the unlikely side of zero
        smaller = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(present | counts.prompt, smaller, logits)
    return logits - params.frequency_penalty * output - params.presence_penalty * present


def ends_with(tokens: Sequence[int], path: Sequence[int], ending: Sequence[int]) -> bool:
    """Whether `tokens` followed by `path` ends with `ending`."""
    length = len(ending)
    if length > len(path):
        tail = [*tokens[len(tokens) - min(len(tokens), length - len(path)) :], *path]
    else:
        tail = list(path[len(path) - length :])
    return tail == list(ending)
