# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""exp(x) as an integer in Triton, as defined in kernels/fixed_point.py.

Kernels must be launched with `enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp_weights(x):
    """fp32 x <= 0 -> exp(x) * 2^40 as int64."""
    inside = tl.maximum(x, -28.0)
    exponent = tl.floor(inside * 1.4426950408889634 + 0.5)
    r = inside - exponent * 0.693359375 - exponent * -2.12194440e-4
    value = r * 0.0013814582489430904 + 0.008368724025785923
    value = value * r + 0.04166838899254799
    value = value * r + 0.1666652113199234
    value = value * r + 0.4999999403953552
    value = value * (r * r) + r + 1.0
    power = ((exponent.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -28.0, 0, (value * power).to(tl.int64))


@triton.jit
def share_of(total, share):
    """int64, fp32 -> the least positive int64 that is at least `share` of `total`."""
    product = share.to(tl.float64) * total.to(tl.float64)
    floor = product.to(tl.int64)
    return tl.maximum(floor + (floor.to(tl.float64) < product), 1)
