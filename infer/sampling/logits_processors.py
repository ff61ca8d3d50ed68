"""Logits processors: penalties, bias and masks, each of which depends on the row's own prefix only.

A row's prefix is the request's tokens and, in a draft, the drafted tokens on the row's path. So a drafted token counts
for the rows below it and for no others, and rows of a tree get the same logits as in plain decoding.

Masks are computed while a GPU runs the forward, and sent to it without waiting (kernels/copies.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.batch.params import pairs
from infer.batch.token_counts import TokenCounts
from infer.request import Request
from kernels.copies import sent, upload
from kernels.operands import WORD, Shaping
from kernels.shape import packed, shape


def shape_rows(request: Request, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """Apply the logits processors to logits `[n, V]` of a request's rows; returns fp32 logits.

    `paths[i]`: the drafted tokens on row i's path, without the root.
    """
    params, device, size = request.params, logits.device, logits.shape[1]
    shaping = Shaping(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if shaping.penalizes:
        counts = count_tokens(request, size, device)
        shaping.prompt, shaping.output = counts.prompt, counts.output
        longest = max(map(len, paths))
        shaping.drafted = upload([[*path] + [-1] * (longest - len(path)) for path in paths], device)
    if params.logit_bias:
        ids, values = zip(*pairs(params.logit_bias), strict=True)
        bias = torch.zeros(size).index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
        shaping.bias = sent(bias, device)
    forbidden = [banned(request, path) for path in paths]
    grammar = None if request.constraint is None else request.constraint.words(paths)
    if grammar is not None or params.allowed_token_ids is not None or any(forbidden):
        shaping.allowed = sent(allowed_words(size, params.allowed_token_ids, forbidden, grammar), device)
    return shape(logits, shaping)


def count_tokens(request: Request, vocab_size: int, device: torch.device) -> TokenCounts:
    if request.counts is None:
        request.counts = TokenCounts(vocab_size, request.prompt_ids, device)
    request.counts.update(request.tokens)
    return request.counts


def banned(request: Request, path: Sequence[int]) -> list[int]:
    """Return the tokens that `bad_words` and `min_tokens` forbid after the request's tokens and `path`."""
    words = [word[-1] for word in request.params.bad_words if ends_with(request.tokens, path, word[:-1])]
    return words + (list(request.stop_ids) if request.output_length + len(path) < request.params.min_tokens else [])


def allowed_words(
    size: int, allowed: Sequence[int] | None, forbidden: Sequence[Sequence[int]], grammar: Tensor | None
) -> Tensor:
    """Return the packed mask `[n, ceil(size / 32)]` of tokens that all of these allow; `forbidden`: a list per row."""
    row = torch.ones(size, dtype=torch.bool)
    if allowed is not None:
        row.zero_()[torch.tensor(allowed)] = True
    masks = packed(row).repeat(len(forbidden), 1)  # copies: kernels need contiguous rows
    if grammar is not None:
        masks &= grammar
    for mask, tokens in zip(masks, forbidden, strict=True):
        for token in tokens:
            mask[token // WORD] &= ~(1 << token % WORD) if token % WORD < WORD - 1 else (1 << WORD - 1) - 1
    return masks


def ends_with(tokens: Sequence[int], path: Sequence[int], ending: Sequence[int]) -> bool:
    """Whether `tokens` followed by `path` ends with `ending`."""
    length = len(ending)
    if length > len(path):
        tail = [*tokens[len(tokens) - min(len(tokens), length - len(path)) :], *path]
    else:
        tail = list(path[len(path) - length :])
    return tail == list(ending)
