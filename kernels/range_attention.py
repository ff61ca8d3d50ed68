"""Attention of training in which a row sees a range of its sequence's keys, and then a range of keys of its tail.

ttt_attention.py and block_attention.py state what is in a tail. All tails of a sequence lie in a line.

Contract: one fp32 softmax runs over both ranges. Gradients of keys are summed over all rows that see them in a fixed
order, so runs are bitwise reproducible with any number of threads.

`dense_ranges`, the specification, materialises all scores. A Triton kernel on CUDA devices
(kernels/triton/range_attention.py) and one in C on CPUs (kernels/cpu/range_attention.c) hold only tiles of them, and
skip keys that no row of a tile sees.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, active_dtype, address, uses_triton

RangeArguments = structure("range_args")  # of range_attention.c
INPUTS = ("q", "k", "v", "tail_k", "tail_v")
BOUNDS = ("begin", "end", "tail_begin", "tail_end")


def kernel_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which a kernel takes x `[..., D]`, in Triton or in C; None where torch runs instead."""
    dtype = active_dtype(x)
    if uses_triton(x.device):
        from kernels.triton.range_attention import supported

        return dtype if supported(x.shape[-1], dtype) else None
    native = x.device.type == "cpu" and dtype in KINDS and x.shape[-1] % LANES == 0 and library() is not None
    return dtype if native else None


def attend(q: Tensor, *inputs: Tensor) -> Tensor:
    """Return `[B, R, nh, D]` for q `[B, R, nh, D]`, k and v `[B, T, nkv, D]`, tail_k and tail_v `[B, E, nkv, D]`.

    And for `BOUNDS`, int32 `[B, R]` each: the first key that a row sees and the end of its range, of both kinds.
    """
    alike, dtype = q.shape[-1] == inputs[1].shape[-1], active_dtype(q)
    cast = [x.to(dtype) for x in (q, *inputs[:4])]
    if not alike or kernel_dtype(q) is None:
        return dense_ranges(*cast, *inputs[4:])
    if not uses_triton(q.device):
        return RangeAttention.apply(*cast, *inputs[4:])
    from kernels.triton.range_attention import RangesAttention

    return RangesAttention.apply(*cast, *inputs[4:])


def dense_ranges(
    q: Tensor, k: Tensor, v: Tensor, tail_k: Tensor, tail_v: Tensor, begin: Tensor, end: Tensor, tail_begin: Tensor,
    tail_end: Tensor,
) -> Tensor:  # fmt: skip
    """As `attend`, in torch. Values may have another size than keys, which the result then has."""
    length, longest = k.shape[1], int((tail_end - tail_begin).amax()) if tail_k.shape[1] else 0
    slot, index = (torch.arange(size, device=q.device) for size in (length, longest))
    tail = (tail_begin[..., None] + index).clamp(max=tail_k.shape[1] - 1).long()  # [B, R, L]
    seen = (slot >= begin[..., None]) & (slot < end[..., None]), index < (tail_end - tail_begin)[..., None]
    sequence = torch.arange(len(q), device=q.device)[:, None, None]
    tail_k, tail_v = (x[sequence, tail] for x in (tail_k, tail_v))  # [B, R, L, nkv, D]
    rows = q.unflatten(2, (k.shape[2], -1))  # [B, R, nkv, G, D]
    scores = torch.einsum("brngd,btnd->brngt", rows, k), torch.einsum("brngd,brlnd->brngl", rows, tail_k)
    hidden = ~torch.cat(seen, dim=-1)[:, :, None, None]
    weights = (torch.cat(scores, dim=-1) * q.shape[-1] ** -0.5).float().masked_fill(hidden, -torch.inf).softmax(-1)
    of_context, of_tail = weights.to(q.dtype).split([length, longest], dim=-1)
    out = torch.einsum("brngt,btnd->brngd", of_context, v) + torch.einsum("brngl,brlnd->brngd", of_tail, tail_v)
    return out.flatten(2, 3)


class RangeAttention(torch.autograd.Function):
    """`attend` in C; the inputs have one dtype."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        tensors = [x.contiguous() for x in inputs]
        out, (peaks, sums) = torch.empty_like(tensors[0]), torch.empty(2, *tensors[0].shape[:3])
        call(tensors, out=out, peaks=peaks, sums=sums)
        ctx.save_for_backward(*tensors, peaks, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *tensors, peaks, sums = ctx.saved_tensors
        of_inputs = zip(INPUTS, tensors[: len(INPUTS)], strict=True)
        gradients = {f"grad_{name}": torch.empty_like(x, dtype=torch.float32) for name, x in of_inputs}
        call(tensors, peaks=peaks, sums=sums, grad_out=grad.to(tensors[0].dtype).contiguous(), **gradients)
        return *(x.to(tensors[0].dtype) for x in gradients.values()), *[None] * len(BOUNDS)


def call(tensors: list[Tensor], **others: Tensor) -> None:
    native, (q, k, _, tail, *_) = library(), tensors
    assert native is not None
    (batch, rows, heads, dim), length, threads = q.shape, k.shape[1], torch.get_num_threads()
    floats = native.range_scratch(length + tail.shape[1], dim)
    named = dict(zip((*INPUTS, *BOUNDS), tensors, strict=True)) | others | {"scratch": torch.empty(threads, floats)}
    sizes = {"batch": batch, "rows": rows, "length": length, "tail": tail.shape[1], "heads": heads, "dim": dim}
    sizes |= {"kv_heads": k.shape[2], "kind": KINDS[q.dtype], "threads": threads, "scratch_floats": floats}
    addresses = {name: address(value) for name, value in named.items()}
    native.range_attention(ctypes.byref(RangeArguments(**addresses, **sizes, scale=dim**-0.5)))
