# pyright: reportCallIssue=false, reportArgumentType=false
"""Attention of training on a GPU, forward and backward (range_attention.py).

A row's keys are two ranges, of the sequence and of all tails in a line, in which those of its own lie side by side. By
arXiv 2307.08691's recurrence, in tiles of keys: neither a mask nor a score is stored, and tiles that no row of a block
of rows sees, before its first key and after its last, are skipped. The forward pass saves one number per row and head,
the base-2 logarithm of its sum of weights.

    range_forward         (block of rows, head, sequence): the output
    range_query_gradient  (block of rows, head, sequence): gradient of the queries; and each row's Σ gradient * output,
                          which the softmax subtracts from every weight's gradient
    key_gradient          (block of keys, KV head, sequence), once for the sequence's keys and once for the tails:
                          gradients of keys and values, over all rows that may see them, head by head: one order, no
                          atomic addition
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton import INTERPRET
from kernels.triton.device import limits

LOWEST = tl.constexpr(-1e30)  # below every score and finite, so that a row without keys gives no NaN
LN_2 = tl.constexpr(0.6931471805599453)  # scores are scaled for base 2


class Blocking(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int


# For head sizes up to 64, 128 and 256: about the largest blocks without register spills that fit into shared memory, on
# devices with warpgroups (Hopper) and on others (Ampere, Ada).
FORWARD = {
    True: (Blocking(128, 64, 4, 3), Blocking(128, 64, 8, 3), Blocking(64, 32, 8, 2)),
    False: (Blocking(64, 64, 4, 3), Blocking(64, 64, 8, 2), Blocking(64, 16, 8, 2)),
}
OF_QUERIES = {
    True: (Blocking(64, 64, 4, 2), Blocking(64, 64, 8, 2), Blocking(32, 64, 8, 1)),
    False: (Blocking(64, 32, 4, 2), Blocking(64, 64, 8, 2), Blocking(32, 64, 8, 1)),
}
OF_KEYS = {
    True: (Blocking(32, 64, 4, 2), Blocking(32, 64, 8, 2), Blocking(64, 32, 8, 1)),
    False: (Blocking(32, 64, 4, 2), Blocking(32, 64, 8, 2), Blocking(32, 32, 8, 1)),
}
FP32 = Blocking(32, 32, 8, 1), Blocking(16, 16, 8, 1), Blocking(16, 16, 8, 1)  # no tensor cores: small products
FP32_FORWARD = Blocking(32, 32, 8, 1), Blocking(16, 16, 4, 1), Blocking(16, 16, 8, 1)  # as FP32, without spills


def blocking(
    sizes: Mapping[bool, Sequence[Blocking]], q: Tensor, fp32: Sequence[Blocking] = FP32
) -> tuple[Blocking, dict[str, int | bool]]:
    """Return the block sizes for q's head size, dtype and device, and the launch options that contain them."""
    candidates = fp32 if q.dtype == torch.float32 else sizes[limits(q.device).warpgroups]
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


@triton.jit
def attend_range(
    queries, k, v, batch, T, kv_head, first, end, scale, peak, total, acc,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add keys [first, end) of each row to its softmax: return its highest score, sum of weights and weighted values.

    k, v `[B, T, KV_HEADS, D]`; queries `[ROWS, D]` of one head.
    """
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
    return peak, total, acc


@triton.jit
def add_query_gradient(
    queries, upstream, k, v, batch, T, kv_head, first, end, log_total, delta, scale, total,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add to `total` `[ROWS, D]` the gradient of the queries by keys [first, end) of each row, but for the scale."""
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
    return total


@triton.jit(do_not_specialize=["M", "T"])
def key_gradient(
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
    store_rows(grad_k, kv_index, in_tile, dk * (scale * LN_2), D)
    store_rows(grad_v, kv_index, in_tile, dv, D)


def supported(head_dim: int, dtype: torch.dtype) -> bool:
    return 16 <= head_dim <= 256 and dtype in (torch.float32, torch.float16, torch.bfloat16)


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


@triton.jit(do_not_specialize=["M", "T", "E"])
def range_forward(
    q, k, v, tail_k, tail_v, firsts, ends, tail_firsts, tail_ends, out, sums, M, T, E, scale,
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
    first, end = tl.load(tail_firsts + index, mask=valid, other=E), tl.load(tail_ends + index, mask=valid, other=0)
    peak, total, acc = attend_range(
        queries, tail_k, tail_v, batch, E, kv_head, first, end, scale, peak, total, acc,
        KV_HEADS, D, D_PADDED, KEYS, UPCAST,
    )  # fmt: skip
    total = tl.where(valid, total, 1.0)
    store_rows(out, index * HEADS + head, valid, acc / total[:, None], D)
    tl.store(sums + (batch * HEADS + head) * M + row, peak + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["M", "T", "E"])
def range_query_gradient(
    q, k, v, tail_k, tail_v, firsts, ends, tail_firsts, tail_ends, out, sums, grad, deltas, grad_q, M, T, E,
    scale, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, ROWS: tl.constexpr,
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
    first, end = tl.load(tail_firsts + index, mask=valid, other=E), tl.load(tail_ends + index, mask=valid, other=0)
    total = add_query_gradient(
        queries, upstream, tail_k, tail_v, batch, E, kv_head, first, end, log_total, delta, scale, total,
        KV_HEADS, D, D_PADDED, KEYS, UPCAST,
    )  # fmt: skip
    store_rows(grad_q, index * HEADS + head, valid, total * (scale * LN_2), D)


class RangesAttention(torch.autograd.Function):
    """Attention of rows q `[B, M, nh, D]` to two ranges of keys each, in one softmax -> `[B, M, nh, D]`.

    k and v `[B, T, nkv, D]` of the sequence, tail_k and tail_v `[B, E, nkv, D]`, all of q's dtype. A row sees keys
    firsts to ends - 1 of the former and tail_firsts to tail_ends - 1 of the latter, `[B, M]` int32 each.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        tensors = [x.contiguous() for x in inputs]
        q, k, tail_k = tensors[0], tensors[1], tensors[3]
        (batch, rows, heads, _), sizes = q.shape, sizes_of(q, k)
        out, sums = torch.empty_like(q), torch.empty(batch, heads, rows, device=q.device)
        shape, options = blocking(FORWARD, q, FP32_FORWARD)
        range_forward[triton.cdiv(rows, shape.rows), heads, batch](
            *tensors, out, sums, rows, k.shape[1], tail_k.shape[1], scale_of(q), **sizes, **options
        )
        ctx.save_for_backward(*tensors, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, tail_k, tail_v, *bounds, out, sums = ctx.saved_tensors
        (batch, rows, heads, _), sizes, scale = q.shape, sizes_of(q, k), scale_of(q)
        grad, deltas, grad_q = grad.contiguous(), torch.empty_like(sums), torch.empty_like(q)
        shape, options = blocking(OF_QUERIES, q)
        range_query_gradient[triton.cdiv(rows, shape.rows), heads, batch](
            q, k, v, tail_k, tail_v, *bounds, out, sums, grad, deltas, grad_q, rows, k.shape[1], tail_k.shape[1],
            scale, **sizes, **options,
        )  # fmt: skip
        shape, options = blocking(OF_KEYS, q)
        gradients = []
        for (keys, values), (firsts, ends) in (((k, v), bounds[:2]), ((tail_k, tail_v), bounds[2:])):
            grad_k, grad_v, length = torch.empty_like(keys), torch.empty_like(values), keys.shape[1]
            reach = reaching(firsts, ends, length, shape)
            if length:  # a first step has no tails
                key_gradient[reach.shape[1], keys.shape[2], batch](
                    q, keys, values, firsts, ends, sums, grad, deltas, reach, grad_k, grad_v, rows, length, scale,
                    **sizes, **options,
                )  # fmt: skip
            gradients += [grad_k, grad_v]
        return grad_q, *gradients, None, None, None, None
