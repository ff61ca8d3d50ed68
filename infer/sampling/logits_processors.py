"""Logits processors: penalties, bias and masks, each of which depends on the row's own prefix only.

A row's prefix is the request's tokens and, in a draft, the drafted tokens on the row's path. So a drafted token counts
for the rows below it and for no others, and rows of a tree get the same logits as in plain decoding.

Masks are computed while a GPU runs the forward, and sent to it without waiting (kernels/upload.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.sampling.params import SamplingParams, pairs
from kernels.shape import WORD, Shaping, packed, shape
from kernels.upload import sent, upload

if TYPE_CHECKING:
    from infer.request import Request

MASKS = ("allowed_token_ids", "bad_words", "min_tokens", "grammar")  # fields that forbid tokens


class TokenCounts:
    """Which tokens occur in a request's prompt, and how often each occurs in its output; updated incrementally."""

    def __init__(self, vocab_size: int, prompt: Sequence[int], device: torch.device) -> None:
        self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt.index_fill_(0, upload(list(prompt), device), True)  # assignment would copy the value from the host
        self.output = torch.zeros(vocab_size, device=device)
        self._counted = len(prompt)

    def update(self, tokens: Sequence[int]) -> None:
        """Count new tokens. `tokens`, prompt and output, extends the sequence of the last call."""
        new = upload(list(tokens[self._counted :]), self.output.device)
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
    grammar: Tensor | None = None,
) -> Tensor:
    """Apply a request's logits processors to the logits `[n, V]` of its rows; returns fp32 logits.

    `paths[i]`: the drafted tokens on row i's path, without the root. `tokens`: prompt and output up to the root, of
    which the last `output_length` are output. `counts` is needed for penalties; `stop_ids` for `min_tokens`.
    `grammar`: int32 `[n, ceil(V / 32)]`, the mask of tokens that it allows at each row (kernels/shape.py).
    """
    device, size = logits.device, logits.shape[1]
    shaping = Shaping(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if shaping.penalises:
        assert counts is not None
        shaping.prompt, shaping.output = counts.prompt, counts.output
        longest = max(map(len, paths))
        shaping.drafted = upload([[*path] + [-1] * (longest - len(path)) for path in paths], device)
    if params.logit_bias:
        ids, values = zip(*pairs(params.logit_bias), strict=True)
        bias = torch.zeros(size).index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
        shaping.bias = sent(bias, device)
    forbidden = [banned(params, tokens, output_length, path, stop_ids) for path in paths]
    if grammar is not None or params.allowed_token_ids is not None or any(forbidden):
        shaping.allowed = sent(allowed_words(size, params.allowed_token_ids, forbidden, grammar), device)
    return shape(logits, shaping)


def banned(
    params: SamplingParams, tokens: Sequence[int], output_length: int, path: Sequence[int], stop_ids: Collection[int]
) -> list[int]:
    """Return the tokens that `bad_words` and `min_tokens` forbid after `tokens` and the `path` that follows them."""
    words = [word[-1] for word in params.bad_words if ends_with(tokens, path, word[:-1])]
    return words + (list(stop_ids) if output_length + len(path) < params.min_tokens else [])


def is_forbidden(request: Request, path: Sequence[int], token: int) -> bool:
    """Return whether a mask of the request forbids `token` after its tokens and `path`; grammars are not considered."""
    params = request.params
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return True
    return token in banned(params, request.tokens, request.output_length, path, request.stop_ids)


def masks_of(request: Request) -> str:
    """Return the names of the masks that the request asks for."""
    return ", ".join(name for name in MASKS if getattr(request.params, name))


def check_first_row(request: Request, vocab_size: int) -> None:
    """Raise ValueError if the masks of a new request together allow no first token."""
    params = request.params
    if masks_of(request) in ("", "grammar"):
        return
    forbidden = banned(params, request.tokens, 0, (), request.stop_ids)
    grammar = None if request.constraint is None else request.constraint.words([[]])
    if not bool(allowed_words(vocab_size, params.allowed_token_ids, [forbidden], grammar).any()):
        names = masks_of(request)
        raise ValueError(f"{names.split(',')[0]}: no token can come first: {names} together allow none; relax one")


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
