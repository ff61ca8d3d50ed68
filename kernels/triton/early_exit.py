# pyright: reportCallIssue=false, reportArgumentType=false
"""Early exit of chains in Triton: one program for all chains."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import SHARED, Drafting

COLUMNS = tl.constexpr(SHARED)


@triton.jit(do_not_specialize=["batch", "deepest", "level"])
def exit_kernel(
    active, length, chance, terms, depths, log_probs, out_active, out_length, out_chance, batch, deepest, level, least,
    B: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, B)
    inside = row < batch
    term = terms + row * (COLUMNS + 2 * deepest)
    slope, row_price = tl.load(term, mask=inside, other=0.0), tl.load(term + 1, mask=inside, other=0.0)
    step_price, level_price = tl.load(term + 2, mask=inside, other=0.0), tl.load(term + 3, mask=inside, other=0.0)
    offset = tl.load(term + COLUMNS + level, mask=inside, other=0.0)
    following = tl.load(term + COLUMNS + deepest + level, mask=inside, other=0.0)
    probability = tl.exp(tl.load(log_probs + row, mask=inside, other=0.0))
    probability = tl.minimum(tl.maximum(probability, least), 1.0 - least)
    confidence = tl.log(probability / (1.0 - probability))
    value = tl.load(chance + row, mask=inside, other=0.0)
    value = value / (1.0 + tl.exp(-(offset + slope * confidence)))
    keep = inside & (tl.load(active + row, mask=inside, other=0) != 0)
    if level > 0:
        keep = keep & (value >= row_price)
    gain = tl.maximum(tl.where(keep, value * following - row_price - step_price, 0.0), 0.0)
    goes_on = (gain > 0) & (tl.sum(gain, axis=0) >= level_price)
    goes_on = goes_on & (tl.load(depths + row, mask=inside, other=0) > level + 1)
    tl.store(out_active + row, goes_on, mask=inside)
    tl.store(out_length + row, tl.load(length + row, mask=inside, other=0) + keep.to(tl.int64), mask=inside)
    tl.store(out_chance + row, value, mask=inside)


def exit_level(
    chains: Drafting, terms: Tensor, depths: Tensor, log_probs: Tensor, level: int, least: float
) -> Drafting:
    """As kernels.early_exit.exit_level."""
    batch, columns = terms.shape
    out = Drafting(*(torch.empty_like(part) for part in chains))
    exit_kernel[1,](
        *chains, terms.contiguous(), depths, log_probs.contiguous(), *out, batch, (columns - SHARED) // 2, level, least,
        B=triton.next_power_of_2(batch), num_warps=1,
    )  # fmt: skip
    return out
