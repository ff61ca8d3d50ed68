# pyright: reportCallIssue=false, reportArgumentType=false
"""Attention of training-time test on a GPU, forward and backward.

A row sees a range of the first step's keys (kernels/triton/key_ranges.py), in tiles of matrix products, and one key of
each later step, elementwise. The forward pass saves one number per row and head, the base-2 logarithm of its sum of
weights.

    ttt_forward         (block of rows, head, sequence): the output
    ttt_query_gradient  (block of rows, head, sequence): gradient of the queries; and each row's Σ gradient * output,
                        which the softmax subtracts from every weight's gradient
    key_gradient        kernels/triton/key_ranges.py, for the first step's keys and values
    ttt_own_gradient    (block of rows, KV head, sequence and later step): gradients of later steps' keys and values
"""

from __future__ import annotations

from collections.abc import Sequence
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

OWN_ROWS = 16  # block of `ttt_own_gradient`, which keeps six `[OWN_ROWS, D]` tensors in registers


@triton.jit(do_not_specialize=["M", "T", "num_later"])
def ttt_forward(
    q, k, v, later_k, later_v, firsts, ends, out, sums, M, T, num_later, scale,
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
    for step in range(num_later):
        kv_index = ((step * tl.num_programs(2) + batch) * M + row) * KV_HEADS + kv_head
        key = load_rows(later_k, kv_index, valid, D, D_PADDED, UPCAST).to(tl.float32)
        score = tl.sum(queries.to(tl.float32) * key, 1) * scale
        highest = tl.maximum(peak, score)
        weight, decay = tl.exp2(score - highest), tl.exp2(peak - highest)
        peak, total = highest, total * decay + weight
        value = load_rows(later_v, kv_index, valid, D, D_PADDED, UPCAST).to(tl.float32)
        acc = acc * decay[:, None] + weight[:, None] * value
    peak, total, acc = attend_range(
        queries, k, v, batch, T, kv_head, first, end, scale, peak, total, acc, KV_HEADS, D, D_PADDED, KEYS, UPCAST
    )
    total = tl.where(valid, total, 1.0)
    store_rows(out, index * HEADS + head, valid, acc / total[:, None], D)
    tl.store(sums + (batch * HEADS + head) * M + row, peak + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["M", "T", "num_later"])
def ttt_query_gradient(
    q, k, v, later_k, later_v, firsts, ends, out, sums, grad, deltas, grad_q, M, T, num_later, scale,
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
    upstream = load_rows(grad, index * HEADS + head, valid, D, D_PADDED, UPCAST)
    output = load_rows(out, index * HEADS + head, valid, D, D_PADDED, UPCAST)
    stat_index = (batch * HEADS + head) * M + row
    log_total = tl.load(sums + stat_index, mask=valid, other=0.0)
    delta = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(deltas + stat_index, delta, mask=valid)
    total = tl.zeros([ROWS, D_PADDED], tl.float32)
    for step in range(num_later):
        kv_index = ((step * tl.num_programs(2) + batch) * M + row) * KV_HEADS + kv_head
        key = load_rows(later_k, kv_index, valid, D, D_PADDED, UPCAST).to(tl.float32)
        value = load_rows(later_v, kv_index, valid, D, D_PADDED, UPCAST).to(tl.float32)
        weight = tl.exp2(tl.sum(queries.to(tl.float32) * key, 1) * scale - log_total)
        dp = tl.sum(upstream.to(tl.float32) * value, 1) - delta
        total += (weight * dp)[:, None] * key
    total = add_query_gradient(
        queries, upstream, k, v, batch, T, kv_head, first, end, log_total, delta, scale, total,
        KV_HEADS, D, D_PADDED, KEYS, UPCAST,
    )  # fmt: skip
    store_rows(grad_q, index * HEADS + head, valid, total * (scale * LN_2), D)


@triton.jit(do_not_specialize=["M", "batches"])
def ttt_own_gradient(
    q, later_k, later_v, sums, grad, deltas, grad_k, grad_v, M, batches, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    kv_head, batch = tl.program_id(1), (tl.program_id(2) % batches).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < M
    kv_index = (tl.program_id(2).to(tl.int64) * M + row) * KV_HEADS + kv_head  # `[steps, B, M, nkv]`
    key = load_rows(later_k, kv_index, valid, D, D_PADDED, True)
    value = load_rows(later_v, kv_index, valid, D, D_PADDED, True)
    dk = tl.zeros([ROWS, D_PADDED], tl.float32)
    dv = tl.zeros([ROWS, D_PADDED], tl.float32)
    for group_index in range(HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + group_index
        query_index, stat_index = (batch * M + row) * HEADS + head, (batch * HEADS + head) * M + row
        queries = load_rows(q, query_index, valid, D, D_PADDED, True)
        upstream = load_rows(grad, query_index, valid, D, D_PADDED, True)
        log_total = tl.load(sums + stat_index, mask=valid, other=0.0)
        delta = tl.load(deltas + stat_index, mask=valid, other=0.0)
        weight = tl.exp2(tl.sum(queries * key, 1) * scale - log_total)
        dp = tl.sum(upstream * value, 1) - delta
        dk += (weight * dp)[:, None] * queries
        dv += weight[:, None] * upstream
    store_rows(grad_k, kv_index, valid, dk * (scale * LN_2), D)
    store_rows(grad_v, kv_index, valid, dv, D)


class TttAttention(torch.autograd.Function):
    """kernels.ttt_attention on q, the `bounds` of its rows, then all keys and all values, all of q's dtype."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, firsts: Tensor, ends: Tensor, *kv: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v, later_k, later_v = arranged(q, kv)
        (batch, rows, heads, _), sizes = q.shape, sizes_of(q, k)
        out, sums = torch.empty_like(q), torch.empty(batch, heads, rows, device=q.device)
        shape, options = blocking(FORWARD, q)
        ttt_forward[triton.cdiv(rows, shape.rows), heads, batch](
            q, k, v, later_k, later_v, firsts, ends, out, sums, rows, k.shape[1], len(kv) // 2 - 1, scale_of(q),
            **sizes, **options,
        )  # fmt: skip
        ctx.save_for_backward(q, firsts, ends, out, sums, *kv)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, firsts, ends, out, sums, *kv = ctx.saved_tensors
        q, k, v, later_k, later_v = arranged(q, kv)
        (batch, rows, heads, _), sizes, scale = q.shape, sizes_of(q, k), scale_of(q)
        num_later, length, kv_heads = len(kv) // 2 - 1, *k.shape[1:3]
        grad, deltas, grad_q = grad.contiguous(), torch.empty_like(sums), torch.empty_like(q)
        shape, options = blocking(OF_QUERIES, q)
        ttt_query_gradient[triton.cdiv(rows, shape.rows), heads, batch](
            q, k, v, later_k, later_v, firsts, ends, out, sums, grad, deltas, grad_q, rows, length, num_later, scale,
            **sizes, **options,
        )  # fmt: skip
        grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
        shape, options = blocking(OF_KEYS, q)
        reach = reaching(firsts, ends, length, shape)
        key_gradient[reach.shape[1], kv_heads, batch](
            q, k, v, firsts, ends, sums, grad, deltas, reach, grad_k, grad_v, rows, length, scale, **sizes, **options
        )
        if not num_later:
            return grad_q, None, None, grad_k, grad_v
        later_grad_k, later_grad_v = torch.empty_like(later_k), torch.empty_like(later_v)
        ttt_own_gradient[triton.cdiv(rows, OWN_ROWS), kv_heads, num_later * batch](
            q, later_k, later_v, sums, grad, deltas, later_grad_k, later_grad_v, rows, batch, scale, **sizes,
            ROWS=OWN_ROWS, num_warps=4,
        )  # fmt: skip
        return grad_q, None, None, grad_k, *later_grad_k, grad_v, *later_grad_v


def arranged(q: Tensor, kv: Sequence[Tensor]) -> list[Tensor]:
    """Return q, the first step's keys and values, and later steps' `[steps, B, M, nkv, D]`, all contiguous."""
    (k, *later_k), (v, *later_v) = kv[: len(kv) // 2], kv[len(kv) // 2 :]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return [q, k, v, *(torch.stack(steps) if steps else k for steps in (later_k, later_v))]
