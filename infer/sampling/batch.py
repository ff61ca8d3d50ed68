"""Builds the per-row parameters of the sampler (kernels/choose.py) from requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.request import Request
from infer.sampling.params import SamplingParams
from infer.speculation.lossy import DRAFTS
from kernels.acceptance import stream
from kernels.choose import ChoiceParameters
from kernels.noise import MASK32

GREEDY = SamplingParams()


def choice_parameters(
    requests: Sequence[Request], device: torch.device, *, drafting: bool = False
) -> ChoiceParameters | None:
    """Return one row of sampling parameters per request, or None when all requests are greedy.

    With `drafting` a drafter gets the target's noise, so that both sample alike; under block verification it must get
    other noise. A request that has failed is treated as greedy.
    """
    params = [GREEDY if request.failed else request.params for request in requests]
    if all(p.temperature == 0 for p in params):
        return None
    return ChoiceParameters(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor([p.top_k for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        seed_low=torch.tensor([request.seed & MASK32 for request in requests], device=device),
        seed_high=torch.tensor([seed_high(request, drafting) for request in requests], device=device),
        restricts=any(p.top_k or p.top_p < 1 or p.min_p for p in params),
    )


def seed_high(request: Request, drafting: bool) -> int:
    high = request.seed >> 32
    if drafting and request.params.acceptance == "block":
        return high ^ stream(DRAFTS, request.computed)
    return high
