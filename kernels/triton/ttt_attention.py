# pyright: reportCallIssue=false, reportArgumentType=false
"""Attention of training-time test on a GPU, forward and backward, by arXiv 2307.08691's recurrence.

A row sees a range of the first step's keys, in tiles of matrix products, and one key of each later step, elementwise:
nothing as wide as the sequence is written. Tiles that no row of a block sees, before its documents and after its slots,
are skipped. The forward pass saves one number per row and head, the base-2 logarithm of its sum of weights.

    ttt_forward         (block of rows, head, sequence): the output
    ttt_query_gradient  (block of rows, head, sequence): gradient of the queries; and each row's Σ gradient * output,
                        which the softmax subtracts from every weight's gradient
    ttt_key_gradient    (block of keys, KV head, sequence): gradients of the first step's keys and values, over all rows
                        that may see them, head by head: one order, no atomic addition
    ttt_own_gradient    (block of rows, KV head, sequence and later step): gradients of later steps' keys and values
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton import INTERPRET

LOWEST = tl.constexpr(-1e30)  # below every score and finite, so that a row without keys gives no NaN


class Blocking(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int


# For head sizes up to 64, 128 and 256: about the largest blocks without register spills.
FORWARD = Blocking(128, 64, 4, 3), Blocking(128, 64, 8, 3), Blocking(64, 32, 8, 2)
OF_QUERIES = Blocking(64, 64, 4, 2), Blocking(64, 64, 8, 2), Blocking(32, 64, 8, 1)
OF_KEYS = Blocking(32, 64, 4, 2), Blocking(32, 64, 8, 2), Blocking(64, 32, 8, 1)
FP32 = Blocking(32, 32, 8, 1), Blocking(16, 16, 8, 1), Blocking(16, 16, 8, 1)  # no tensor cores: small products
OWN_ROWS = 16  # block of `ttt_own_gradient`, which keeps six `[OWN_ROWS, D]` tensors in registers


def blocking(sizes: Sequence[Blocking], q: Tensor) -> tuple[Blocking, dict[str, int | bool]]:
    """Return the block sizes for q's head size and dtype, and the launch options that contain them."""
    candidates = FP32 if q.dtype == torch.float32 else sizes
    shape = candidates[bisect.bisect_left((64, 128), q.shape[3])]
    upcast = q.dtype == torch.bfloat16 and os.environ.get(INTERPRET) == "1"
    tiles = {"ROWS": shape.rows, "KEYS": shape.keys, "UPCAST": upcast}
    return shape, tiles | {"num_warps": shape.warps, "num_stages": shape.stages}


@triton.jit
def load_rows(base, place, valid, D: tl.constexpr, D_PADDED: tl.constexpr, UPCAST: tl.constexpr):
    """Load lines `place` `[N]` of `[.., D]` -> `[N, D_PADDED]`, zero where not valid."""
    d = tl.arange(0, D_PADDED)
    x = tl.load(base + place[:, None] * D + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def store_rows(base, place, valid, x, D: tl.constexpr):
    d = tl.arange(0, x.shape[1])
    mask = valid[:, None] & (d < D)[None, :]
    tl.store(base + place[:, None] * D + d[None, :], x.to(base.dtype.element_ty), mask=mask)


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
    stop = tl.max(end, 0)
    for tile in range(tl.min(first, 0) // KEYS * KEYS, stop, KEYS):
        position = tile + tl.arange(0, KEYS)
        in_tile = position < stop
        kv_index = (batch * T + position) * KV_HEADS + kv_head
        key = load_rows(k, kv_index, in_tile, D, D_PADDED, UPCAST)
        value = load_rows(v, kv_index, in_tile, D, D_PADDED, UPCAST)
        visible = (position[None, :] >= first[:, None]) & (position[None, :] < end[:, None])
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        weights, decay = tl.exp2(scores - highest[:, None]), tl.exp2(peak - highest)
        peak, total = highest, total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
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
    stop = tl.max(end, 0)
    for tile in range(tl.min(first, 0) // KEYS * KEYS, stop, KEYS):
        position = tile + tl.arange(0, KEYS)
        in_tile = position < stop
        kv_index = (batch * T + position) * KV_HEADS + kv_head
        key = load_rows(k, kv_index, in_tile, D, D_PADDED, UPCAST)
        value = load_rows(v, kv_index, in_tile, D, D_PADDED, UPCAST)
        visible = (position[None, :] >= first[:, None]) & (position[None, :] < end[:, None])
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        weights = tl.exp2(tl.where(visible, scores - log_total[:, None], float("-inf")))
        dp = tl.dot(upstream, tl.trans(value), input_precision="ieee") - delta[:, None]
        total = tl.dot((weights * dp).to(key.dtype), key, total, input_precision="ieee")
    store_rows(grad_q, index * HEADS + head, valid, total * (scale * 0.6931471805599453), D)  # scale is for base 2


@triton.jit(do_not_specialize=["M", "T"])
def ttt_key_gradient(
    q, k, v, firsts, ends, sums, grad, deltas, reach, grad_k, grad_v, M, T, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    block, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = block * KEYS + tl.arange(0, KEYS)
    in_tile = position < T
    kv_index = (batch * T + position) * KV_HEADS + kv_head
    key = load_rows(k, kv_index, in_tile, D, D_PADDED, UPCAST)
    value = load_rows(v, kv_index, in_tile, D, D_PADDED, UPCAST)
    dk = tl.zeros([KEYS, D_PADDED], tl.float32)
    dv = tl.zeros([KEYS, D_PADDED], tl.float32)
    range_of = reach + (batch * tl.num_programs(0) + block) * 2
    start, stop = tl.load(range_of), tl.load(range_of + 1)
    for group_index in range(HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + group_index
        for tile in range(start, stop, ROWS):
            row = tile + tl.arange(0, ROWS)
            valid = row < M
            base, stat_base = batch * M, (batch * HEADS + head) * M
            first = tl.load(firsts + base + row, mask=valid, other=T)
            end = tl.load(ends + base + row, mask=valid, other=0)
            place = (base + row) * HEADS + head
            queries = load_rows(q, place, valid, D, D_PADDED, UPCAST)
            upstream = load_rows(grad, place, valid, D, D_PADDED, UPCAST)
            log_total = tl.load(sums + stat_base + row, mask=valid, other=0.0)
            delta = tl.load(deltas + stat_base + row, mask=valid, other=0.0)
            visible = (position[:, None] >= first[None, :]) & (position[:, None] < end[None, :])
            scores = tl.dot(key, tl.trans(queries), input_precision="ieee") * scale
            weights = tl.exp2(tl.where(visible, scores - log_total[None, :], float("-inf")))
            dv = tl.dot(weights.to(upstream.dtype), upstream, dv, input_precision="ieee")
            dp = tl.dot(value, tl.trans(upstream), input_precision="ieee") - delta[None, :]
            dk = tl.dot((weights * dp).to(queries.dtype), queries, dk, input_precision="ieee")
    store_rows(grad_k, kv_index, in_tile, dk * (scale * 0.6931471805599453), D)
    store_rows(grad_v, kv_index, in_tile, dv, D)


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
    store_rows(grad_k, kv_index, valid, dk * (scale * 0.6931471805599453), D)
    store_rows(grad_v, kv_index, valid, dv, D)


def supported(head_dim: int, dtype: torch.dtype) -> bool:
    return 16 <= head_dim <= 256 and dtype in (torch.float32, torch.float16, torch.bfloat16)


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
        ttt_key_gradient[reach.shape[1], kv_heads, batch](
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


def sizes_of(q: Tensor, k: Tensor) -> dict[str, Any]:
    (*_, heads, dim), kv_heads = q.shape, k.shape[2]
    return {"HEADS": heads, "KV_HEADS": kv_heads, "D": dim, "D_PADDED": triton.next_power_of_2(dim)}


def scale_of(q: Tensor) -> float:
    return q.shape[3] ** -0.5 * math.log2(math.e)


def reaching(firsts: Tensor, ends: Tensor, length: int, shape: Blocking) -> Tensor:
    """Return the range of rows that may see a block of keys, `[B, blocks of keys, 2]` int32: first and end.

    Rounded to whole blocks of rows.
    """
    batch, rows = firsts.shape
    blocks = triton.cdiv(rows, shape.rows)
    missing = blocks * shape.rows - rows
    low = torch.nn.functional.pad(firsts, (0, missing), value=length).view(batch, blocks, -1).amin(-1)
    high = torch.nn.functional.pad(ends, (0, missing)).view(batch, blocks, -1).amax(-1)
    begin = torch.arange(0, length, shape.keys, dtype=torch.int32, device=firsts.device)[:, None]
    overlapping = (high[:, None] > begin) & (low[:, None] < begin + shape.keys)  # [B, blocks of keys, blocks of rows]
    number = torch.arange(blocks, dtype=torch.int32, device=firsts.device)
    start = torch.where(overlapping, number, blocks).amin(-1)
    stop = torch.where(overlapping, number + 1, 0).amax(-1)
    return torch.stack([start, stop], dim=-1) * shape.rows
