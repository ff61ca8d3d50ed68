"""RMSNorm, gated activations and rotary embedding in training on a CPU, forward and backward, in C.

torch passes over its operands five to ten times for each. Contract: no row depends on another, arithmetic is fp32, and
what comes out is rounded once. The gradient of a norm's weight is a sum over rows in a fixed order, whatever the number
of threads.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, active_dtype, address, uses_triton

PART = 64  # of row_gradients.c
RowArguments = structure("row_args")  # of row_gradients.c


def supported(x: Tensor, size: int, *others: Tensor) -> bool:
    """Return whether these functions take x, in rows of `size`, and `others`, which are read in fp32."""
    if x.device.type != "cpu" or size % LANES or uses_triton(x.device):
        return False
    fp32 = all(other.dtype is torch.float32 for other in others)
    return fp32 and {x.dtype, active_dtype(x)} <= KINDS.keys() and library() is not None


def norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
    """Divide x `[..., H]` by its root mean square and scale it by offset + weight `[H]`."""
    return RowOperation.apply(x, weight, "norm_rows", x.shape[-1], dtype, {"eps": eps, "offset": offset})


def gate_mul(x: Tensor, *, gelu: bool) -> Tensor:
    """Multiply silu(gate), or with `gelu` its tanh approximation, by up: x `[..., 2 I]` of both -> `[..., I]`."""
    return RowOperation.apply(x, None, "gate_rows", x.shape[-1] // 2, x.dtype, {"gelu": gelu})


class RowOperation(torch.autograd.Function):
    """A function of row_gradients.c of x, whose output has rows of `size`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor | None, name: str, size: int, dtype: torch.dtype, numbers: dict[str, Any]
    ) -> Tensor:
        x, out = x.contiguous(), torch.empty(*x.shape[:-1], size, dtype=dtype)
        call(name, x, size, out, weight=weight, **numbers)
        ctx.save_for_backward(x, weight)
        ctx.rest = name, size, numbers
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, weight), (name, size, numbers) = ctx.saved_tensors, ctx.rest
        out, parts = torch.empty_like(x), torch.empty(-(-x.numel() // x.shape[-1] // PART), size)
        call(name, x, size, out, grad=grad.contiguous(), weight=weight, parts=parts, **numbers)
        return out, None if weight is None else parts.sum(0), None, None, None, None


class Rotate(torch.autograd.Function):
    """Rotate x `[..., heads, D]`, whose halves form pairs; cos and sin `[..., 1, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        cos, sin = (table.expand(*x.shape[:-2], 1, -1).contiguous() for table in (cos, sin))
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rows = x.flatten(-2).flatten(0, -2)  # [N, heads * D]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = rows.new_empty(rows.shape)
    call("turn_rows", rows, rows.shape[1], out, cos=cos, sin=sin, stride=rows.stride(0), dim=x.shape[-1])
    return out.view(x.shape)


def call(name: str, x: Tensor, size: int, out: Tensor, grad: Tensor | None = None, **others: Any) -> None:
    assert x.dtype is torch.float32 or x.dtype is out.dtype, "C has no other kinds"
    kinds = {"kind": x, "grad_kind": out if grad is None else grad, "out_kind": out}
    named = {"x": x, "out": out, "grad": grad, **others}
    values = {key: value if isinstance(value, int | float) else address(value) for key, value in named.items()}
    values |= {key: KINDS[tensor.dtype] for key, tensor in kinds.items()}
    sizes = {"rows": out.numel() // out.shape[-1], "size": size, "threads": torch.get_num_threads()}
    getattr(library(), name)(ctypes.byref(RowArguments(**values, **sizes)))
