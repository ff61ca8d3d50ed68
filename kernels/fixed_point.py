"""exp(x) for x <= 0 as an integer, with the same bits on every device and in every implementation.

Sums of floating-point probabilities depend on their order, which compilers choose by dtype and layout; sums of integers
do not. As in kernels/noise.py the exponential is computed from additions and multiplications alone, each rounded by
itself, so they must not be fused. The polynomial was fitted for this project; its relative error is below 2^-23.
"""

from __future__ import annotations

import torch
from torch import Tensor

FRACTION_BITS = 40  # a sum over up to 2^22 columns fits into int64, and its rounding to fp64 is defined by IEEE 754
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # the first has so few bits that its products are exact
# exp(r) = 1 + r + r^2 P(r) for |r| <= log(2) / 2; lowest power first, exact in fp32
EXP_POLYNOMIAL = (
    0.4999999403953552,
    0.1666652113199234,
    0.04166838899254799,
    0.008368724025785923,
    0.0013814582489430904,
)
SMALLEST = -28.0  # exp of anything less is below 2^-40


def exp_weights(x: Tensor) -> Tensor:
    """Return exp(x) * 2^40 as int64, rounded towards zero, for fp32 x <= 0; -inf gives 0."""
    inside = x.clamp(min=SMALLEST)
    exponent = torch.floor(inside * LOG2_E + 0.5)
    r = inside - exponent * LN2_HIGH - exponent * LN2_LOW
    value = torch.full_like(r, EXP_POLYNOMIAL[-1])
    for coefficient in EXP_POLYNOMIAL[-2::-1]:
        value = value * r + coefficient
    value = value * (r * r) + r + 1
    power = ((exponent.to(torch.int32) + FRACTION_BITS + 127) << 23).view(torch.float32)
    return torch.where(x < SMALLEST, 0, (value * power).to(torch.int64))


def share_of(total: Tensor, share: Tensor) -> Tensor:
    """Return the least positive integer that is at least `share` (fp32) of `total` (int64)."""
    return (share.double() * total.double()).ceil().long().clamp(min=1)
