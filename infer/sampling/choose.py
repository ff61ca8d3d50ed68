"""Samples the target's token at every row of a step, with the parameters of the row's request and the row's prefix."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from infer.engine.isolation import isolated, together
from infer.request import Request
from infer.sampling.batch import choice_parameters
from infer.sampling.logits_processors import TokenCounts, shape_logits
from infer.sampling.logprobs import TokenLogprob, token_logprobs
from infer.speculation.tree import DraftTree
from kernels.choose import ChoiceParameters, choose, warped_log_probs
from kernels.upload import upload

MOST_ROWS = 64  # whose logits are copied at once, for log-probabilities


class Emitted(NamedTuple):
    """Tokens that a request emitted, which were sampled at the first of these rows."""

    request: Request
    rows: Sequence[int]
    tokens: Sequence[int]


@dataclass
class Choices:
    """Tokens sampled at the rows of a step, and what they were sampled from.

    Only rows that ask for it have processed logits: whether a row's logits are copied and widened to fp32 does not
    depend on the rows beside it.
    """

    token: Tensor  # [R]
    raw: Tensor  # [R, V] the target's logits
    parameters: ChoiceParameters | None  # per row
    processed: dict[int, Tensor]  # by row: logits [V] after penalties, bias and masks, fp32

    def warped_log_probs(self, rows: Sequence[int], index: Tensor | None = None) -> Tensor:
        """Return the logits `[n, V]` of the warped distribution at `rows`, fp32; `index`: the rows on its device."""
        index = upload(list(rows), self.raw.device) if index is None else index
        logits = self.raw[index].float()
        for place, row in enumerate(rows if self.processed else ()):
            if row in self.processed:
                logits[place] = self.processed[row]
        return warped_log_probs(logits, self.parameters and self.parameters.rows(index))

    def logprobs(self, emitted: Sequence[Emitted], group: Collection[Request]) -> dict[str, list[TokenLogprob]]:
        """Return the log-probabilities of tokens by request, for those of `group` that ask for any.

        By one copy to the device and one read. Failed requests get none.
        """
        scored = [
            (request, row, token)
            for request, rows, tokens in emitted
            if request.params.logprobs is not None and request in group and not request.failed
            for row, token in zip(rows, tokens, strict=False)  # no more of a path than was emitted
        ]
        if not scored:
            return {}
        scored.sort(key=lambda each: each[0].params.logprobs_of == "processed")  # the raw ones first
        requests, rows, tokens = zip(*scored, strict=True)
        index, ids = upload([rows, tokens], self.raw.device)
        raw = sum(request.params.logprobs_of == "raw" for request in requests)

        def parts() -> Iterator[Tensor]:
            for first in range(0, raw, MOST_ROWS):
                yield self.raw[index[first : min(raw, first + MOST_ROWS)]]
            for first in range(raw, len(rows), MOST_ROWS):
                yield self.warped_log_probs(rows[first : first + MOST_ROWS], index[first : first + MOST_ROWS])

        tops, results = [request.params.logprobs or 0 for request in requests], dict[str, list[TokenLogprob]]()
        for request, logprob in zip(requests, token_logprobs(parts(), ids, tops), strict=True):
            results.setdefault(request.request_id, []).append(logprob)
        return results


def row_parameters(requests: Sequence[Request], counts: Sequence[int], device: torch.device) -> ChoiceParameters | None:
    """Return the parameters of `counts[b]` rows of each request; to be called before a forward."""

    def make(group: Sequence[Request]) -> ChoiceParameters | None:
        return choice_parameters(group, device, counts if len(group) == len(requests) else None)

    return together(requests, make)


def choose_rows(
    requests: Sequence[Request],
    counts: Sequence[int],
    parameters: ChoiceParameters | None,
    logits: Tensor,
    positions: Tensor,
    tree: DraftTree | None = None,
) -> Choices:
    """Sample a token at each row of logits `[R, V]`, with its `parameters`: those that `row_parameters` returns.

    `counts[b]` is the number of rows of request b: its nodes in `tree`, or without a tree the one row after its tokens.
    """
    processed: dict[int, Tensor] = {}
    first = 0
    for b, (request, count) in enumerate(zip(requests, counts, strict=True)):
        if request.params.shapes_logits or request.constraint is not None:
            paths = [[]] if tree is None else drafted_paths(tree, b, count)
            with isolated(request):
                processed |= enumerate(shape_rows(request, logits[first : first + count], paths), start=first)
        first += count
    token = choose(logits, parameters, positions)
    if processed:
        rows = upload(list(processed), logits.device)
        shaped = torch.stack(list(processed.values()))
        token[rows] = choose(shaped, parameters and parameters.rows(rows), positions[rows])
    return Choices(token, logits, parameters, processed)


def shape_rows(request: Request, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """Apply the logits processors to logits `[n, V]` of a request's rows; `paths[i]`: drafted tokens up to row i."""
    return shape_logits(
        logits,
        request.params,
        count_tokens(request, logits.shape[1], logits.device),
        request.tokens,
        request.output_length,
        paths,
        request.stop_ids,
        None if request.constraint is None else request.constraint.words(paths),
    )


def drafted_paths(tree: DraftTree, row: int, count: int) -> list[list[int]]:
    """Return the drafted tokens on the path from the root to each node, the node's own token included."""
    tokens, parents = tree.token[row].tolist(), tree.parent[row].tolist()
    paths: list[list[int]] = [[]]
    for node in range(1, count):
        paths.append([*paths[parents[node]], tokens[node]])
    return paths


def count_tokens(request: Request, vocab_size: int, device: torch.device) -> TokenCounts | None:
    params = request.params
    if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
        return None
    if request.counts is None:
        request.counts = TokenCounts(vocab_size, request.prompt_ids, device)
    request.counts.update(request.tokens)
    return request.counts
