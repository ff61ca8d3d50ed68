"""Builds the per-row parameters of the sampler (kernels/choose.py) from requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.request import Request
from infer.sampling.params import SamplingParams
from kernels.acceptance import DRAFTS, stream
from kernels.choose import ChoiceParameters, Limits
from kernels.noise import MASK32
from kernels.upload import upload_columns

GREEDY = SamplingParams()


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
    params = [GREEDY if request.failed else request.params for request in requests]
    if all(p.temperature == 0 for p in params):
        return None
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
