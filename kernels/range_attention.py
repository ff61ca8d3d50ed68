"""Attention of training on a CPU, forward and backward in C: a row sees a range of context keys, and one of its own.

What ttt_attention.py and block_attention.py compute with their keys in a line (kernels/cpu/range_attention.c): scores,
softmax and sums are in fp32, no matrix of scores exists, and keys that no row of a tile sees cost nothing. A row's
result depends on that row alone up to the order of the softmax's sum; gradients of keys are summed over the rows in
order, so runs are bitwise reproducible with any number of threads.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, address

RangeArguments = structure("range_args")  # of range_attention.c
BOUNDS = ("begin", "end", "own_begin", "own_end")
KEYS = ("k", "v", "own_k", "own_v")


def range_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which the kernel takes x `[..., D]`, autocast's if that is on; None where torch runs."""
    if x.device.type != "cpu" or x.shape[-1] % LANES or library() is None:
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return dtype if dtype in KINDS else None


class RangeAttention(torch.autograd.Function):
    """q `[B, R, nh, D]`, keys and values `[B, T, nkv, D]`, own keys and values `[B, E, nkv, D]` -> `[B, R, nh, D]`.

    All in one dtype. bounds int32 `[B, R]`: the first key of each row and the end of its range, of both kinds.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        tensors = [q.contiguous(), *(x.contiguous() for x in inputs)]
        out, (peaks, sums) = torch.empty_like(tensors[0]), torch.empty(2, *q.shape[:3])
        call(tensors, {"out": out, "peaks": peaks, "sums": sums})
        ctx.save_for_backward(*tensors, peaks, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *tensors, peaks, sums = ctx.saved_tensors
        gradients = [torch.empty_like(x, dtype=torch.float32) for x in tensors[:5]]
        results = dict(zip(("grad_q", *(f"grad_{name}" for name in KEYS)), gradients, strict=True))
        grad = grad.to(tensors[0].dtype).contiguous()
        call(tensors, {"peaks": peaks, "sums": sums, "grad_out": grad, **results})
        return *(x.to(tensors[0].dtype) for x in gradients), None, None, None, None


def call(tensors: list[Tensor], others: dict[str, Tensor]) -> None:
    native, (q, k, _, own, *_) = library(), tensors
    assert native is not None
    (batch, rows, heads, dim), kv_heads, threads = q.shape, k.shape[2], torch.get_num_threads()
    floats = native.range_scratch(k.shape[1] + own.shape[1], dim)
    named = dict(zip(("q", *KEYS, *BOUNDS), tensors, strict=True)) | others
    scratch = torch.empty(threads, floats)
    sizes = {"batch": batch, "rows": rows, "length": k.shape[1], "own": own.shape[1], "heads": heads}
    arguments = RangeArguments(
        **{name: address(value) for name, value in named.items()},
        **sizes,
        kv_heads=kv_heads,
        dim=dim,
        kind=KINDS[q.dtype],
        threads=threads,
        scratch=scratch.data_ptr(),
        scratch_floats=floats,
        scale=dim**-0.5,
    )
    native.range_attention(ctypes.byref(arguments))
