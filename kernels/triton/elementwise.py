# pyright: reportCallIssue=false, reportArgumentType=false
"""Row-wise operations on a GPU: one program per row, or part of one, with block sizes that depend on the sizes alone.

Statistics are fp32; with 16-bit dtypes, intermediate results are rounded where torch would round them. A norm's output
has the dtype that `norm_dtype` states by default.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import norm_dtype
from kernels.triton.dependent import follow, launched, load_ahead, overlaps
from kernels.triton.launch import Variant

GATE_BLOCK = 1024


@triton.jit
def store_norm(value, dtype: tl.constexpr, scale, out, i, inside, size, eps, CENTERED: tl.constexpr = False):
    """Store the norm of value `[SIZE]`, in fp32 of `dtype` and 0 past `size`, times `scale` at `out`."""
    root = tl.sqrt_rn(tl.sum(value * value, 0) / size + eps)
    scale = scale.to(tl.float32)
    if CENTERED:
        scaled = (value / root) * (1.0 + scale)
    else:
        scaled = (value / root).to(dtype).to(tl.float32) * scale
    tl.store(out + i, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_kernel(
    x,
    delta,
    weight,
    out,
    total,
    x_stride,
    delta_stride,
    size,
    eps,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = i < size
    scale = load_ahead(weight + i, mask=inside, other=0.0)
    follow(PDL)
    value = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * delta_stride + i, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + row * size + i, value, mask=inside)
        value = value.to(tl.float32)
    store_norm(value, x.dtype.element_ty, scale, out + row * size, i, inside, size, eps, CENTERED)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, x_stride, size, eps, SIZE: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = i < size
    value = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, value - tl.sum(value, 0) / size, 0.0)
    root = tl.sqrt_rn(tl.sum(centered * centered, 0) / size + eps)
    scaled = (centered / root) * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    shifted = scaled + tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, shifted.to(out.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x `[R, H]`, rows of stride 1 -> `[R, H]`."""
    rows, size = x.shape
    out = x.new_empty(rows, size, dtype=out_dtype or norm_dtype(x, weight))
    layer_norm_kernel[(rows,)](
        x,
        weight,
        bias,
        out,
        x.stride(0),
        size,
        eps,
        SIZE=triton.next_power_of_2(size),
        num_warps=_warps(size),
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def norm_beside_kernel(
    x, y, x_weight, y_weight, out, x_stride, y_stride, size, eps, SIZE: tl.constexpr, PDL: tl.constexpr
):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = i < size
    destination = out + row * 2 * size
    first = tl.program_id(1) == 0
    if first:
        scale = load_ahead(x_weight + i, mask=inside, other=0.0)
    else:
        scale = load_ahead(y_weight + i, mask=inside, other=0.0)
    follow(PDL)
    if first:
        value = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
        store_norm(value, x.dtype.element_ty, scale, destination, i, inside, size, eps)
    else:
        value = tl.load(y + row * y_stride + i, mask=inside, other=0.0).to(tl.float32)
        store_norm(value, y.dtype.element_ty, scale, destination + size, i, inside, size, eps)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, centered: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x `[R, H]`, rows of stride 1 -> `[R, H]`."""
    rows, size = x.shape
    out = x.new_empty(rows, size, dtype=out_dtype or norm_dtype(x, weight))
    _norm(x, x, weight, out, out, eps, add=False, centered=centered)
    return out


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, centered: bool = False
) -> tuple[Tensor, Tensor]:
    """x and delta `[R, H]` -> the norm of their sum, and the sum."""
    rows, size = x.shape
    out, total = x.new_empty(rows, size, dtype=norm_dtype(x, weight)), x.new_empty(rows, size)
    _norm(x, delta, weight, out, total, eps, add=True, centered=centered)
    return out, total


def norm_beside(x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, eps: float) -> Tensor:
    """x and y `[R, H]` -> `[R, 2 H]`."""
    rows, size = x.shape
    out = torch.empty(rows, 2 * size, dtype=x.dtype, device=x.device)
    variant = _norm_beside_variant(size, overlaps(x.device))
    variant.launch((rows, 2), x, y, x_weight, y_weight, out, x.stride(0), y.stride(0), size, eps)
    return out


@functools.cache
def _norm_beside_variant(size: int, pdl: bool) -> Variant:
    constants = {"SIZE": triton.next_power_of_2(size), "PDL": pdl}
    return Variant(norm_beside_kernel, constants, num_warps=_warps(size), enable_fp_fusion=False, **launched(pdl))


@triton.jit
def embed_norm_gelu_kernel(x, ids, table, weight, bias, out, x_stride, factor, size, eps, SIZE: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = i < size
    dtype = out.dtype.element_ty
    token = tl.load(ids + row).to(tl.int64)
    value = tl.load(table + token * size + i, mask=inside, other=0.0).to(tl.float32)
    value = (value * factor).to(dtype).to(tl.float32)
    value += tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    value = value.to(dtype).to(tl.float32)
    root = tl.sqrt_rn(tl.sum(value * value, 0) / size + eps)
    normed = (value / root).to(dtype).to(tl.float32) * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    shifted = normed.to(dtype).to(tl.float32) + tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    shifted = shifted.to(dtype).to(tl.float32)
    active = 0.5 * shifted * (1.0 + tl.erf(shifted * 0.7071067811865476))
    tl.store(out + row * size + i, active.to(dtype), mask=inside)


def embed_norm_gelu(
    x: Tensor, ids: Tensor, table: Tensor, factor: float, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """x `[R, H]`, ids `[R]`, table `[V, H]`, contiguous -> `[R, H]`."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    embed_norm_gelu_kernel[(rows,)](
        x,
        ids,
        table,
        weight,
        bias,
        out,
        x.stride(0),
        float(factor),
        size,
        eps,
        SIZE=triton.next_power_of_2(size),
        num_warps=_warps(size),
        enable_fp_fusion=False,
    )
    return out


def _warps(size: int) -> int:
    return 8 if size > 2048 else 4


def _norm(
    x: Tensor, delta: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, add: bool, centered: bool
) -> None:
    size = x.shape[1]
    variant = _norm_variant(size, add, centered, overlaps(x.device))
    variant.launch((x.shape[0],), x, delta, weight, out, total, x.stride(0), delta.stride(0), size, eps)


@functools.cache
def _norm_variant(size: int, add: bool, centered: bool, pdl: bool) -> Variant:
    constants = {"SIZE": triton.next_power_of_2(size), "ADD": add, "CENTERED": centered, "PDL": pdl}
    return Variant(rms_norm_kernel, constants, num_warps=_warps(size), enable_fp_fusion=False, **launched(pdl))


@triton.jit
def activate(x, GELU: tl.constexpr):
    """Return SiLU of x, or GELU, in fp32."""
    inner = x
    if GELU:  # approximated by tanh: x times the sigmoid of 2 sqrt(2 / pi) (x + 0.044715 x^3)
        inner = 1.5957691216057308 * (x + 0.044715 * (x * x * x))
    decay = tl.exp(-tl.abs(inner))  # never overflows
    return x * tl.where(inner < 0, decay, 1.0) / (1.0 + decay)


@triton.jit
def gate_mul_kernel(gate_up, out, stride, size, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(gate_up + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + i, mask=inside, other=0.0).to(tl.float32)
    product = activate(gate, GELU).to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * size + i, product.to(out.dtype.element_ty), mask=inside)


def gate_mul(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """`[R, 2 I]`, rows of stride 1 -> `[R, I]`: SiLU or GELU of the gate, times up."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(size, GATE_BLOCK))
    gate_mul_kernel[grid](
        gate_up,
        out,
        gate_up.stride(0),
        size,
        BLOCK=GATE_BLOCK,
        GELU=gelu,
        enable_fp_fusion=False,  # the bits of kernels/triton/linear.py, which activates its own outputs
    )
    return out


@triton.jit
def gelu_kernel(x, out, stride, size, BLOCK: tl.constexpr, TANH: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    value = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        active = activate(value, True)
    else:
        active = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(out + row * size + i, active.to(out.dtype.element_ty), mask=inside)


def gelu(x: Tensor, *, tanh: bool) -> Tensor:
    """x `[R, I]`, rows of stride 1 -> `[R, I]`: GELU, by erf or approximated by tanh."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    grid = (rows, triton.cdiv(size, GATE_BLOCK))
    gelu_kernel[grid](x, out, x.stride(0), size, BLOCK=GATE_BLOCK, TANH=tanh, enable_fp_fusion=False)
    return out
