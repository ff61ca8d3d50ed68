# pyright: reportCallIssue=false, reportArgumentType=false
"""Attention of a block drafter in training on a GPU, forward and backward.

A row's keys are two ranges, of the sequence and of all blocks' rows in a line, in which those of its own block lie side
by side; so neither a mask nor a score is stored. The forward pass saves one number per row and head, the base-2
logarithm of its sum of weights.

    block_forward         (block of rows, head, sequence): the output
    block_query_gradient  (block of rows, head, sequence): gradient of the queries; and each row's Σ gradient * output,
                          which the softmax subtracts from every weight's gradient
    key_gradient          kernels/triton/key_ranges.py, once for the sequence's keys and once for the blocks'
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton.key_ranges import (
    FORWARD,
    LN_2,
    LOWEST,
    OF_KEYS,
    OF_QUERIES,
    Blocking,
    add_query_gradient,
    attend_range,
    blocking,
    key_gradient,
    load_rows,
    reaching,
    scale_of,
    sizes_of,
    store_rows,
)

FP32_FORWARD = Blocking(32, 32, 8, 1), Blocking(16, 16, 4, 1), Blocking(16, 16, 8, 1)  # as FP32, without spills


@triton.jit(do_not_specialize=["M", "T"])
def block_forward(
    q, k, v, block_k, block_v, firsts, ends, block_firsts, block_ends, out, sums, M, T, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = head // (HEADS // KV_HEADS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < M
    index = batch * M + row
    first, end = tl.load(firsts + index, mask=valid, other=T), tl.load(ends + index, mask=valid, other=0)
    queries = load_rows(q, index * HEADS + head, valid, D, D_PADDED, UPCAST)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PADDED], tl.float32)
    peak, total, acc = attend_range(
        queries, k, v, batch, T, kv_head, first, end, scale, peak, total, acc, KV_HEADS, D, D_PADDED, KEYS, UPCAST
    )
    first, end = tl.load(block_firsts + index, mask=valid, other=M), tl.load(block_ends + index, mask=valid, other=0)
    peak, total, acc = attend_range(
        queries, block_k, block_v, batch, M, kv_head, first, end, scale, peak, total, acc,
        KV_HEADS, D, D_PADDED, KEYS, UPCAST,
    )  # fmt: skip
    total = tl.where(valid, total, 1.0)
    store_rows(out, index * HEADS + head, valid, acc / total[:, None], D)
    tl.store(sums + (batch * HEADS + head) * M + row, peak + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["M", "T"])
def block_query_gradient(
    q, k, v, block_k, block_v, firsts, ends, block_firsts, block_ends, out, sums, grad, deltas, grad_q, M, T, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = head // (HEADS // KV_HEADS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < M
    index = batch * M + row
    queries = load_rows(q, index * HEADS + head, valid, D, D_PADDED, UPCAST)
    upstream = load_rows(grad, index * HEADS + head, valid, D, D_PADDED, UPCAST)
    output = load_rows(out, index * HEADS + head, valid, D, D_PADDED, UPCAST)
    stat_index = (batch * HEADS + head) * M + row
    log_total = tl.load(sums + stat_index, mask=valid, other=0.0)
    delta = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(deltas + stat_index, delta, mask=valid)
    total = tl.zeros([ROWS, D_PADDED], tl.float32)
    first, end = tl.load(firsts + index, mask=valid, other=T), tl.load(ends + index, mask=valid, other=0)
    total = add_query_gradient(
        queries, upstream, k, v, batch, T, kv_head, first, end, log_total, delta, scale, total,
        KV_HEADS, D, D_PADDED, KEYS, UPCAST,
    )  # fmt: skip
    first, end = tl.load(block_firsts + index, mask=valid, other=M), tl.load(block_ends + index, mask=valid, other=0)
    total = add_query_gradient(
        queries, upstream, block_k, block_v, batch, M, kv_head, first, end, log_total, delta, scale, total,
        KV_HEADS, D, D_PADDED, KEYS, UPCAST,
    )  # fmt: skip
    store_rows(grad_q, index * HEADS + head, valid, total * (scale * LN_2), D)


class RangesAttention(torch.autograd.Function):
    """Attention of rows q `[B, M, nh, D]` to two ranges of keys each, in one softmax -> `[B, M, nh, D]`.

    k and v `[B, T, nkv, D]` of the sequence, block_k and block_v `[B, M, nkv, D]` of the rows, all of q's dtype. A row
    sees keys firsts to ends - 1 of the former and block_firsts to block_ends - 1 of the latter, `[B, M]` int32 each.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_k: Tensor,
        block_v: Tensor,
        firsts: Tensor,
        ends: Tensor,
        block_firsts: Tensor,
        block_ends: Tensor,
    ) -> Tensor:
        tensors = [x.contiguous() for x in (q, k, v, block_k, block_v, firsts, ends, block_firsts, block_ends)]
        (batch, rows, heads, _), sizes = q.shape, sizes_of(q, k)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        sums = torch.empty(batch, heads, rows, device=q.device)
        shape, options = blocking(FORWARD, q, FP32_FORWARD)
        block_forward[triton.cdiv(rows, shape.rows), heads, batch](
            *tensors, out, sums, rows, k.shape[1], scale_of(q), **sizes, **options
        )
        ctx.save_for_backward(*tensors, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, block_k, block_v, *bounds, out, sums = ctx.saved_tensors
        (batch, rows, heads, _), sizes, scale = q.shape, sizes_of(q, k), scale_of(q)
        grad, deltas, grad_q = grad.contiguous(), torch.empty_like(sums), torch.empty_like(q)
        shape, options = blocking(OF_QUERIES, q)
        block_query_gradient[triton.cdiv(rows, shape.rows), heads, batch](
            q, k, v, block_k, block_v, *bounds, out, sums, grad, deltas, grad_q, rows, k.shape[1], scale,
            **sizes, **options,
        )  # fmt: skip
        shape, options = blocking(OF_KEYS, q)
        gradients = []
        for (keys, values), (firsts, ends) in (((k, v), bounds[:2]), ((block_k, block_v), bounds[2:])):
            grad_k, grad_v, length = torch.empty_like(keys), torch.empty_like(values), keys.shape[1]
            reach = reaching(firsts, ends, length, shape)
            key_gradient[reach.shape[1], keys.shape[2], batch](
                q, keys, values, firsts, ends, sums, grad, deltas, reach, grad_k, grad_v, rows, length, scale,
                **sizes, **options,
            )  # fmt: skip
            gradients += [grad_k, grad_v]
        return grad_q, *gradients, None, None, None, None
