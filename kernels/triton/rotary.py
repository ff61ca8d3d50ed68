# pyright: reportCallIssue=false, reportArgumentType=false
"""QK norm, rotary embedding and the cache write of keys and values in one launch: a program per row, for all heads.

And the cache write alone. Values that are not finite are stored as kernels/copies.py states: no tile of attention can
hold them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import QKNorm
from kernels.triton.dependent import follow, launched, load_ahead, overlaps
from kernels.triton.launch import Variant


@triton.jit
def within_fp8(x):
    """Clamp fp32 to the range of e4m3; NaN stays NaN."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit(do_not_specialize=["slots"])
def rotate_and_write_kernel(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    slot,
    q,
    cache,
    stride,
    slots,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    LINES: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    row, half = tl.program_id(0).to(tl.int64), D // 2
    head, i = tl.arange(0, LINES)[:, None], tl.arange(0, HALF)[None, :]
    in_half = i < half
    inside = in_half & (head < HEADS + KV_HEADS)
    dtype = q.dtype.element_ty
    # ahead of the wait: the step computes angles and slots before its layers, and the kernel ahead is a layer's product
    angle = row * D + i
    cos1, cos2 = load_ahead(cos + angle, in_half, 0.0), load_ahead(cos + angle + half, in_half, 0.0)
    sin1, sin2 = load_ahead(sin + angle, in_half, 0.0), load_ahead(sin + angle + half, in_half, 0.0)
    slot_offset = load_ahead(slot + row) * D
    if NORMED:  # constant
        weight = tl.where(head < HEADS, q_weight + i, k_weight + i)
        w1, w2 = load_ahead(weight, inside, 0.0), load_ahead(weight + half, inside, 0.0)
    follow(PDL)
    source = qkv + row * stride + head * D + i
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    keys = inside & (head >= HEADS)
    value1 = tl.load(source + KV_HEADS * D, mask=keys, other=0.0).to(tl.float32)
    value2 = tl.load(source + KV_HEADS * D + half, mask=keys, other=0.0).to(tl.float32)
    if NORMED:
        root = tl.sqrt_rn((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        w1, w2 = w1.to(tl.float32), w2.to(tl.float32)
        if CENTERED:
            first = ((first / root) * (1.0 + w1)).to(dtype).to(tl.float32)
            second = ((second / root) * (1.0 + w2)).to(dtype).to(tl.float32)
        else:
            first = ((first / root).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
            second = ((second / root).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    cos1, sin1, cos2, sin2 = cos1.to(tl.float32), sin1.to(tl.float32), cos2.to(tl.float32), sin2.to(tl.float32)
    # products are rounded as torch rounds them
    left = ((first * cos1).to(dtype).to(tl.float32) - (second * sin1).to(dtype).to(tl.float32)).to(dtype)
    right = ((second * cos2).to(dtype).to(tl.float32) + (first * sin2).to(dtype).to(tl.float32)).to(dtype)
    destination = q + (row * HEADS + head) * D + i
    queries = inside & (head < HEADS)
    tl.store(destination, left, mask=queries)
    tl.store(destination + half, right, mask=queries)
    finite1, finite2 = is_finite(value1), is_finite(value2)
    finite = finite1 & finite2
    left = tl.where(finite, left.to(tl.float32), float("nan"))
    right = tl.where(finite, right.to(tl.float32), float("nan"))
    value1, value2 = tl.where(finite1, value1, 0.0), tl.where(finite2, value2, 0.0)
    if FP8:
        left, right, value1, value2 = within_fp8(left), within_fp8(right), within_fp8(value1), within_fp8(value2)
    slots = slots.to(tl.int64)
    stored = cache.dtype.element_ty
    destination = cache + (head - HEADS) * slots * D + slot_offset + i
    tl.store(destination, left.to(stored), mask=keys)
    tl.store(destination + half, right.to(stored), mask=keys)
    destination += KV_HEADS * slots * D
    tl.store(destination, value1.to(stored), mask=keys)
    tl.store(destination + half, value2.to(stored), mask=keys)


def rotate_and_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, norm: QKNorm | None, slots: Tensor, cache: Tensor, num_heads: int
) -> Tensor:
    rows, _, dim = qkv.shape
    assert qkv.stride()[1:] == (dim, 1), "a row's heads lie beside each other"
    assert cos.is_contiguous(), "the kernel ahead would copy it"
    assert sin.is_contiguous(), "the kernel ahead would copy it"
    kv_heads = cache.shape[1]
    q = torch.empty(rows, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps, centered = norm or (qkv, qkv, 0.0, False)
    fp8 = cache.dtype is torch.float8_e4m3fn
    variant = _variant(num_heads, kv_heads, dim, norm is not None, centered, fp8, overlaps(qkv.device))
    strides = qkv.stride(0), cache.shape[2]
    variant.launch((rows,), qkv, cos, sin, q_weight, k_weight, slots, q, cache, *strides, eps)
    return q


@functools.cache
def _variant(heads: int, kv_heads: int, dim: int, normed: bool, centered: bool, fp8: bool, pdl: bool) -> Variant:
    padded = triton.next_power_of_2(heads + kv_heads)
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "D": dim, "LINES": padded, "HALF": triton.next_power_of_2(dim // 2),
        "NORMED": normed, "CENTERED": centered, "FP8": fp8, "PDL": pdl,
    }  # fmt: skip
    warps = 8 if padded * dim > 4096 else 4
    return Variant(rotate_and_write_kernel, constants, num_warps=warps, enable_fp_fusion=False, **launched(pdl))


@triton.jit(do_not_specialize=["slots"])
def write_kernel(
    k, v, slot, cache, k_stride, k_head, v_stride, v_head, slots,
    D: tl.constexpr, VALUE: tl.constexpr, PADDED: tl.constexpr, BESIDE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED)
    value = tl.load(v + row * v_stride + head * v_head + d, mask=d < VALUE, other=0.0).to(tl.float32)
    key = tl.load(k + row * k_stride + head * k_head + d, mask=d < D, other=0.0).to(tl.float32)
    finite = is_finite(value)
    key = tl.where(tl.min(finite.to(tl.int32), 0) > 0, key, float("nan"))
    value = tl.where(finite, value, 0.0)
    if not BESIDE:
        key = tl.where(d < VALUE, value, key)
    if FP8:
        key, value = within_fp8(key), within_fp8(value)
    slots = slots.to(tl.int64)
    stored = cache.dtype.element_ty
    destination = cache + (head * slots + tl.load(slot + row)) * D + d
    tl.store(destination, key.to(stored), mask=d < D)
    if BESIDE:
        tl.store(destination + tl.num_programs(1) * slots * D, value.to(stored), mask=d < D)


def write_kv(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """As kernels.copies.write_kv."""
    rows, kv_heads, dim = k.shape
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    write_kernel[rows, kv_heads](
        k, v, slots, cache, *k.stride()[:2], *v.stride()[:2], cache.shape[2],
        D=dim, VALUE=v.shape[-1], PADDED=triton.next_power_of_2(dim), BESIDE=len(cache) == 2,
        FP8=cache.dtype is torch.float8_e4m3fn, num_warps=1 if dim <= 256 else 4,
    )  # fmt: skip
