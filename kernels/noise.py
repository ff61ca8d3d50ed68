"""Gumbel noise by (seed, position, token id), with the same bits on every device and in every implementation.

A counter-based hash gives 32 bits; two logarithms turn them into noise. Libraries' logarithms differ in the last bit
between processors, so it is computed here from additions, multiplications and bit shifts alone, each rounded by itself,
whose results IEEE 754 defines. They must not be fused (C: `fp-contract=off`; Triton: `enable_fp_fusion=False`). The
polynomial was fitted for this project; its relative error is below 2^-23.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.library import library

MASK32 = 0xFFFFFFFF
# log(1 + f) = f - f^2 / 2 + f^3 P(f) for sqrt(1/2) <= 1 + f < sqrt(2); lowest power first, exact in fp32
LOG_POLYNOMIAL = (
    0.333333283662796,
    -0.2500029504299164,
    0.20001474022865295,
    -0.1664225459098816,
    0.14202052354812622,
    -0.12972047924995422,
    0.1271306723356247,
    -0.08103015273809433,
)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # the first has so few bits that its products are exact
ROOT_HALF_BITS = 0x3F3504F3  # of sqrt(1/2)
# Streams of noise: of the coins, and of drafts whose noise must be independent of the target's. Both depend on the
# position of the step's root, since noise that a rejected draft has revealed must not be used again.
COINS, DRAFTS = 0x2545F491, 0x5BD1E995
GOLDEN = 0x9E3779B1
LEAST = 2.0**-126  # the smallest normal fp32 number; smaller weights count as zero


def mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every input bit affects every output bit (finaliser of MurmurHash3)."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def stream(purpose: int, root: int) -> int:
    """Return what to xor a seed's upper half with, for noise of one purpose in a step with its root at `root`."""
    return (purpose + root * GOLDEN) & MASK32


def row_keys(seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> Tensor:
    """Hash everything that a row's noise depends on except the token id: `[R]` each -> `[R]` int64 below 2^32."""
    return mix32(mix32(mix32(seed_low) ^ seed_high) ^ (positions & MASK32))


def gumbel_noise(seed_low: Tensor, seed_high: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return g(seed, position, v) in fp32: seeds and positions `[R]`, token_ids `[V]` or `[R, V]` -> `[R, V]`.

    A row's key takes three rounds of `mix32` and the token id is mixed with it in two more, so neighbouring seeds,
    positions and ids give unrelated noise.
    """
    keys = row_keys(seed_low, seed_high, positions)
    native = library() if keys.device.type == "cpu" and token_ids.ndim == 1 else None
    if native is None:
        return gumbel_of(noise_words(keys, token_ids))
    keys, token_ids = keys.contiguous(), token_ids.contiguous()
    out = torch.empty(len(keys), len(token_ids))
    native.gumbel_noise(keys.data_ptr(), token_ids.data_ptr(), out.data_ptr(), *out.shape)
    return out


def noise_words(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return 32 random bits per row and token: keys `[R]`, token_ids `[V]` or `[R, V]` -> `[R, V]` int64."""
    keys = keys[:, None]
    return mix32(((mix32(token_ids & MASK32) + keys * GOLDEN) & MASK32) ^ keys)


def gumbel_of(words: Tensor) -> Tensor:
    """Return -log(-log(1 - u)) with u = (word + 1/2) / 2^32, kept below 1."""
    u = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    fraction, exponent = split(1 - u)
    near = u < 0.25  # small u are large noise, and 1 - u would lose their precision
    exponential = -log_of(torch.where(near, -u, fraction), torch.where(near, 0.0, exponent))
    return -exact_log(exponential)


def exact_log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive, normal fp32 numbers."""
    return log_of(*split(x))


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return f and e in fp32 with x = (1 + f) 2^e and sqrt(1/2) <= 1 + f < sqrt(2)."""
    bits = x.view(torch.int32)
    exponent = (bits - ROOT_HALF_BITS) >> 23
    return (bits - (exponent << 23)).view(torch.float32) - 1, exponent.float()


def log_of(f: Tensor, exponent: Tensor) -> Tensor:
    """Return log((1 + f) 2^exponent). The order of these operations is part of the contract."""
    value = torch.full_like(f, LOG_POLYNOMIAL[-1])
    for coefficient in LOG_POLYNOMIAL[-2::-1]:
        value = value * f + coefficient
    square = f * f
    value = value * f * square - 0.5 * square
    return value + exponent * LN2_LOW + f + exponent * LN2_HIGH
