"""Sampling: the choice of a token from logits, greedy or sampled, as argmax over v of log p'(v) + g(seed, position, v).

p' is the distribution after temperature, min-p, top-k and top-p; g is Gumbel noise from a counter-based hash of (seed,
position, token id), so the choice depends on the row's logits, parameters and seed alone - never on the batch, on the
drafted tokens, or on a generator's state (arXiv 2408.07978, 2506.05632). At temperature 0 there is no noise. Ties go to
the lowest token id. Logits with a NaN among them have no choice: -1 takes the place of a token, which ends the request
(infer/sampling/emission.py); a draft is then any token.

The noise, the division by the temperature and all restrictions have the same bits everywhere (kernels/noise.py,
kernels/fixed_point.py), so a GPU and a CPU choose the same token from the same logits.
"""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import replace

import torch
from torch import Tensor

from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, address, uses_triton
from kernels.fixed_point import exp_weights, share_of
from kernels.noise import exact_log, gumbel_noise
from kernels.operands import NO_LIMITS, ChoiceParameters

MAX_BEST = 64  # most columns per row that the kernels rank; torch ranks larger counts, which drafts rarely need


def restrict(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set logits `[R, V]` (already divided by the temperature) to -inf outside min-p, then top-k, then top-p.

    min-p (arXiv 2407.01082) removes tokens less likely than min_p times the most likely one. Top-p keeps the smallest
    set of most likely remaining tokens whose total probability reaches top_p. Probabilities are summed as integers, so
    that no sum depends on its order. Tokens that tie with the last one kept are kept too, for the same reason.
    """
    if bool((min_p > 0).any()):
        min_logit = logits.amax(-1) + torch.where(min_p > 0, exact_log(min_p), -torch.inf)
        logits = logits.masked_fill(logits < min_logit[:, None], -torch.inf)
    by_k, by_p = bool((top_k > 0).any()), bool((top_p < 1).any())
    if not (by_k or by_p):
        return logits
    ordered = logits.sort(dim=-1, descending=True).values
    size = logits.shape[1]
    if by_k:
        last = torch.where(top_k > 0, top_k, size).clamp(max=size) - 1
        threshold = ordered.gather(1, last[:, None])
        logits = logits.masked_fill(logits < threshold, -torch.inf)
        ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    if by_p:
        weights = exp_weights(ordered - ordered[:, :1])
        sums = weights.cumsum(-1)
        kept = (sums - weights < share_of(sums[:, -1:], top_p[:, None])) & (ordered > -torch.inf)
        last = kept.sum(-1).clamp(min=1) - 1
        threshold = torch.where(top_p < 1, ordered.gather(1, last[:, None])[:, 0], -torch.inf)
        logits = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    return logits


def choose(
    logits: Tensor, parameters: ChoiceParameters | None, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """Return the token chosen at each row: logits `[R, V]`, positions `[R]` -> `[R]` int64.

    `parameters` None: every row is greedy. `token_ids` are the target ids of the columns, so that a drafter uses the
    target's noise: `[V]` for a draft vocabulary, `[R, V]` where each row has its own candidates; by default columns are
    target ids.
    """
    if uses_triton(logits.device):
        from kernels.triton import choose as gpu

        return gpu.best(logits, parameters, positions, token_ids, 1)[1][:, 0]
    if (native := _native_arguments(logits, parameters, positions, token_ids)) is None:
        columns = largest(choice_keys(logits, parameters, positions, token_ids))
    else:
        lib, leading, trailing = native
        columns = torch.empty(len(logits), dtype=torch.int64)
        lib.choose(*map(address, leading), columns.data_ptr(), *trailing)
    return _tokens(columns[:, None], token_ids)[:, 0]


def largest(keys: Tensor) -> Tensor:
    """Return the column of the largest number of each row `[R, V]`, the lowest of equal ones; -1 beside a NaN."""
    columns = keys.argmax(-1)  # the first NaN, if there is one
    return columns.masked_fill(keys.gather(1, columns[:, None])[:, 0].isnan(), -1)


def _tokens(columns: Tensor, token_ids: Tensor | None) -> Tensor:
    """Return the target ids of columns `[R, C]`."""
    if token_ids is None:
        return columns
    return token_ids[columns] if token_ids.ndim == 1 else token_ids.gather(1, columns.clamp(min=0))  # -1: any token


def _native_arguments(
    logits: Tensor, parameters: ChoiceParameters | None, positions: Tensor, token_ids: Tensor | None
) -> tuple[CDLL, list[Tensor | None], tuple[int, ...]] | None:
    """Return the C library and the arguments before and after the output pointers; None if it does not support these.

    The C kernels replace some sixty small operations and need no memory for the noise.
    """
    native, (count, size) = library(), logits.shape
    if native is None or logits.device.type != "cpu" or (parameters is not None and parameters.restricts):
        return None
    if size % LANES or logits.dtype not in KINDS or logits.stride(1) != 1:
        return None
    if token_ids is not None and token_ids.ndim > 1:
        return None
    if parameters is None:
        zeros = torch.zeros(count, dtype=torch.int64)
        inputs = [torch.zeros(count), zeros, zeros, zeros, token_ids]
    else:
        by_request, repeat = (parameters.temperature, parameters.seed_low, parameters.seed_high), parameters.repeat
        by_row = by_request if repeat == 1 else (field.repeat_interleave(repeat) for field in by_request)
        inputs = [*by_row, positions, token_ids]
    assert all(x is None or x.dtype in (torch.int64, torch.float32) for x in inputs)
    leading = [logits, *(None if x is None else x.contiguous() for x in inputs)]
    return native, leading, (count, logits.stride(0), size, KINDS[logits.dtype])


def choose_best(
    logits: Tensor, parameters: ChoiceParameters | None, positions: Tensor, token_ids: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` tokens of each row that the rule ranks first, `[R, count]` int64, as children of draft nodes.

    Also returns their log-probabilities under a softmax of the rule's keys, `[R, count]`. Arguments as for `choose`.
    """
    if uses_triton(logits.device) and count <= MAX_BEST:
        from kernels.triton import choose as gpu

        values, tokens, _ = gpu.best(logits, parameters, positions, token_ids, count, mass=True)
        return tokens, values
    columns, values = _rank_columns(logits, parameters, positions, token_ids, count)
    return _tokens(columns, token_ids), values


def best_columns(
    logits: Tensor, parameters: ChoiceParameters | None, positions: Tensor, token_ids: Tensor, count: int
) -> Tensor:
    """Return the `count` columns of each row that the rule ranks first, ascending, `[R, count]` int64.

    Arguments as for `choose`, with token_ids `[V]`; top-k, top-p and min-p are ignored.
    """
    parameters = parameters and replace(parameters, limits=NO_LIMITS)
    if uses_triton(logits.device) and count <= MAX_BEST:
        from kernels.triton import choose as gpu

        return gpu.best(logits, parameters, positions, token_ids, count, as_columns=True)[1].sort(dim=1).values
    native = _native_arguments(logits, parameters, positions, token_ids)
    if native is None or count > MAX_BEST:
        keys = choice_keys(logits, parameters, positions, token_ids).float()
        return keys.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    lib, leading, trailing = native
    columns, keys = torch.empty(len(logits), count, dtype=torch.int64), torch.empty(len(logits), count)
    lib.choose_best(*map(address, leading), columns.data_ptr(), keys.data_ptr(), None, count, *trailing)
    return columns.sort(dim=1).values


def _rank_columns(
    logits: Tensor, parameters: ChoiceParameters | None, positions: Tensor, token_ids: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    native = _native_arguments(logits, parameters, positions, token_ids)
    if native is not None and count <= MAX_BEST:
        lib, leading, trailing = native
        rows = len(logits)
        columns, keys = torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count)
        masses = torch.empty(rows)
        outputs = (tensor.data_ptr() for tensor in (columns, keys, masses))
        lib.choose_best(*map(address, leading), *outputs, count, *trailing)
        return columns, keys - keys[:, :1] - masses.log()[:, None]
    keys = choice_keys(logits, parameters, positions, token_ids).float().log_softmax(-1)
    if token_ids is not None and token_ids.ndim > 1:  # few columns
        ordered = keys.sort(dim=1, descending=True, stable=True)
        return ordered.indices[:, :count], ordered.values[:, :count]
    largest = keys.topk(count)
    return largest.indices, largest.values


def choice_keys(
    logits: Tensor, parameters: ChoiceParameters | None, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """Return the keys `[R, V]` of which `choose` takes the argmax: the rule in plain torch. Arguments as there."""
    if parameters is None:
        return logits
    parameters = parameters.by_row()
    keys = warped_log_probs(logits, parameters)
    sampled = (parameters.temperature > 0).nonzero()[:, 0]
    if len(sampled):
        p = parameters.rows(sampled)
        ids = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
        ids = ids if ids.ndim == 1 else ids[sampled]
        keys[sampled] += gumbel_noise(p.seed_low, p.seed_high, positions[sampled], ids)
    return keys


def warped_log_probs(logits: Tensor, parameters: ChoiceParameters | None) -> Tensor:
    """Return the logits `[R, V]` of the warped distribution p' (of a greedy row, unchanged), in fp32 and new memory."""
    warped = logits.float().clone()
    if parameters is None:
        return warped
    parameters = parameters.by_row()
    if uses_triton(logits.device):
        from kernels.triton import choose as gpu

        warped /= torch.where(parameters.temperature > 0, parameters.temperature, 1.0)[:, None]
        if not parameters.restricts:
            return warped
        thresholds = gpu.find_thresholds(logits, parameters)
        return warped.masked_fill_(warped < thresholds[:, None], -torch.inf)
    sampled = (parameters.temperature > 0).nonzero()[:, 0]
    if len(sampled):
        p = parameters.rows(sampled)
        scaled = warped[sampled] / p.temperature[:, None]
        warped[sampled] = restrict(scaled, p.top_k, p.top_p, p.min_p) if p.restricts else scaled
    return warped


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute log-probabilities under a softmax of logits `[R, V]`: of `tokens` `[R]`, and the `top` largest.

    Returns each token's log-probability `[R]`, its rank counted from 1 `[R]`, and the ids and values of the largest,
    `[R, top]` each, ties by lowest id.
    """
    if uses_triton(logits.device):
        from kernels.triton import choose as gpu

        return gpu.logprobs(logits, tokens, top)
    log_p = logits.float().log_softmax(-1)
    token_logprobs = log_p.gather(1, tokens[:, None])
    rank = (log_p > token_logprobs).sum(1) + 1
    if not top:
        empty = tokens[:, None][:, :0]
        return token_logprobs[:, 0], rank, empty, empty.float()
    best = log_p.sort(dim=-1, descending=True, stable=True)
    return token_logprobs[:, 0], rank, best.indices[:, :top], best.values[:, :top]
