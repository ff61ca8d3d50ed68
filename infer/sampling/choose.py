"""Samples the target's token at every row of a step, with the parameters of the row's request and the row's prefix."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from infer.batch.logprobs import TokenLogprob, token_logprobs
from infer.batch.params import SamplingParams
from infer.batch.tree import DraftTree
from infer.request import Request
from infer.sampling.isolation import isolated, together
from infer.sampling.logits_processors import shape_rows
from kernels.choose import choose, warped_log_probs
from kernels.copies import upload, upload_columns
from kernels.noise import DRAFTS, MASK32, stream
from kernels.operands import ChoiceParameters, Limits

GREEDY = SamplingParams()
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


def choice_parameters(
    requests: Sequence[Request],
    device: torch.device,
    counts: Sequence[int] | None = None,
    *,
    drafting: bool = False,
) -> ChoiceParameters | None:
    """Return `counts[b]` rows of sampling parameters per request, by default one, or None if all are greedy.

    With `drafting` a drafter gets the target's noise, so that both sample alike; under block verification it must get
    other noise. A request that has failed is treated as greedy.
    """
    return None if all_greedy(requests) else sampled_parameters(requests, device, counts, drafting=drafting)


def all_greedy(requests: Sequence[Request]) -> bool:
    return all(request.failed or request.params.temperature == 0 for request in requests)


def sampled_parameters(
    requests: Sequence[Request], device: torch.device, counts: Sequence[int] | None, *, drafting: bool
) -> ChoiceParameters:
    params = [GREEDY if request.failed else request.params for request in requests]
    integers = [(p.top_k, r.seed & MASK32, seed_high(r, drafting)) for p, r in zip(params, requests, strict=True)]
    fractions = [(p.temperature, p.top_p, p.min_p) for p in params]
    if counts is not None:
        integers, fractions = (
            [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
            for rows in (integers, fractions)
        )
    columns = upload_columns(list(zip(*integers, strict=True)), list(zip(*fractions, strict=True)), device)
    top_k, low, high, temperature, top_p, min_p = columns
    limits = Limits(
        *(any(uses) for uses in zip(*((p.top_k > 0, p.top_p < 1, p.min_p > 0) for p in params), strict=True))
    )
    return ChoiceParameters(temperature, top_k, top_p, min_p, low, high, limits)


def seed_high(request: Request, drafting: bool) -> int:
    high = request.seed >> 32
    if drafting and request.params.acceptance == "block":
        return high ^ stream(DRAFTS, request.computed)
    return high


def row_parameters(requests: Sequence[Request], counts: Sequence[int], device: torch.device) -> ChoiceParameters | None:
    """Return the parameters of `counts[b]` rows of each request; to be called before a forward."""
    if all_greedy(requests):
        return None
    return together(requests, lambda group: choice_parameters(group, device, counts if group is requests else None))


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
    choices = Choices(choose(logits, parameters, positions), logits, parameters, processed={})
    if any(request.params.shapes_logits or request.constraint is not None for request in requests):
        process_rows(choices, requests, counts, positions, tree)
    return choices


def process_rows(
    choices: Choices, requests: Sequence[Request], counts: Sequence[int], positions: Tensor, tree: DraftTree | None
) -> None:
    """Process the logits of requests that ask for it, and sample from them anew."""
    logits, parameters, first = choices.raw, choices.parameters, 0
    for b, (request, count) in enumerate(zip(requests, counts, strict=True)):
        if request.params.shapes_logits or request.constraint is not None:
            paths = [[]] if tree is None else drafted_paths(tree, b, count)
            with isolated(request):
                shaped = shape_rows(request, logits[first : first + count], paths)
                choices.processed |= enumerate(shaped, start=first)
        first += count
    if choices.processed:
        rows = upload(list(choices.processed), logits.device)
        stacked = torch.stack(list(choices.processed.values()))
        choices.token[rows] = choose(stacked, parameters and parameters.rows(rows), positions[rows])


def drafted_paths(tree: DraftTree, row: int, count: int) -> list[list[int]]:
    """Return the drafted tokens on the path from the root to each node, the node's own token included."""
    tokens, parents = tree.token[row].tolist(), tree.parent[row].tolist()
    paths: list[list[int]] = [[]]
    for node in range(1, count):
        paths.append([*paths[parents[node]], tokens[node]])
    return paths
