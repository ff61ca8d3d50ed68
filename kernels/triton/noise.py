# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Gumbel noise in Triton, as defined in kernels/noise.py. Kernels must be launched with `enable_fp_fusion=False`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix32(x):
    """uint32 -> uint32."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def row_key(seed_low, seed_high, position):
    """int64 each -> uint32."""
    low, high, place = seed_low.to(tl.uint32), seed_high.to(tl.uint32), position.to(tl.uint32)
    return mix32(mix32(mix32(low) ^ high) ^ place)


@triton.jit
def gumbel_noise(key, token_ids):
    """One row's key and its columns' ids [N] int64 -> [N] fp32."""
    word = mix32((mix32(token_ids.to(tl.uint32)) + key * 0x9E3779B1) ^ key)
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355)
    fraction, exponent = split(1.0 - u)
    near = u < 0.25
    exponential = -log_of(tl.where(near, -u, fraction), tl.where(near, 0.0, exponent))
    return -exact_log(exponential)


@triton.jit
def exact_log(x):
    fraction, exponent = split(x)
    return log_of(fraction, exponent)


@triton.jit
def split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0, exponent.to(tl.float32)


@triton.jit
def log_of(f, exponent):
    value = f * -0.08103015273809433 + 0.1271306723356247
    value = value * f + -0.12972047924995422
    value = value * f + 0.14202052354812622
    value = value * f + -0.1664225459098816
    value = value * f + 0.20001474022865295
    value = value * f + -0.2500029504299164
    value = value * f + 0.333333283662796
    square = f * f
    value = value * f * square - 0.5 * square
    return value + exponent * -2.12194440e-4 + f + exponent * 0.693359375
