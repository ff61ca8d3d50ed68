# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Recurrent layers: one kernel convolves rows and one keeps the last columns; one kernel runs a linear recurrence.

A program of the recurrence has a head and a block of a state's columns in registers. It goes through all rows of a
request that are a chain, or, in a tree, through the ancestors of one node, so that no state of a node is stored. Both
are the same loop of the same kernel, so a row has the same bits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.recurrent_rows import L2_EPS, RecurrentRows
from kernels.triton.dependent import follow, launched, overlaps
from kernels.triton.elementwise import activate
from kernels.triton.launch import Variant

CHANNELS = 512  # of a program
MOST_NODES = tl.constexpr(64)  # of a tree: bits of a word; a 65th row has the bit of the first, its ancestor
TILE = 1024  # numbers of a state in a warp's registers,
LEAST = 8  # columns of it, of which memory reads no fewer at a time


@triton.jit
def parent_of(node, parents, begin, TREES: tl.constexpr):
    """Return the parent of a row of a request, or of a column of its state: -1, and -2 the column before it."""
    above = node - 1
    if TREES:
        above = tl.where(node >= 0, tl.load(parents + begin + node, mask=node >= 0, other=0).to(tl.int64), above)
    return above


@triton.jit
def convolve_kernel(
    x, weight, bias, windows, out, owner, first, slots, parents, x_stride, slot_stride, size,
    TAPS: tl.constexpr, BIASED: tl.constexpr, KEPT: tl.constexpr, TREES: tl.constexpr, SILU: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    inside = i < size
    request = tl.load(owner + row)
    begin = tl.load(first + request)
    window = windows
    if KEPT:
        window += tl.load(slots + request) * slot_stride
    total = tl.zeros([N], tl.float32)
    if BIASED:
        total += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        node = row - begin
        for _ in tl.static_range(TAPS - 1 - tap):
            node = parent_of(node, parents, begin, TREES)
        value = tl.load(x + (begin + node) * x_stride + i, mask=inside & (node >= 0), other=0.0).to(tl.float32)
        if KEPT:
            column = window + (node + TAPS - 1) * size + i
            value += tl.load(column, mask=inside & (node < 0), other=0.0).to(tl.float32)
        total += tl.load(weight + i * TAPS + tap, mask=inside, other=0.0).to(tl.float32) * value
    if SILU:
        total = activate(total, False)
    tl.store(out + row * size + i, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def keep_kernel(
    x, windows, first, slots, advance, x_stride, slot_stride, size,
    OLD: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Keep the last OLD columns, at most P, of a request's: of the window and its rows."""
    follow(PDL)
    request, i = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
    begin, end = tl.load(first + request), tl.load(first + request + 1)
    column = tl.arange(0, P)
    row = column + (end - begin) - OLD  # of the request, or below 0 a column of its state
    kept = windows + tl.load(slots + request) * slot_stride + i[None, :]
    moved = (column < OLD)[:, None] & (i < size)[None, :] & tl.load(advance + request) & (end > begin)
    old = tl.load(kept + (row + OLD)[:, None] * size, mask=moved & (row < 0)[:, None], other=0.0)
    new = tl.load(x + (begin + row)[:, None] * x_stride + i[None, :], mask=moved & (row >= 0)[:, None], other=0.0)
    tl.debug_barrier()  # columns are read by other threads than write them
    tl.store(kept + column[:, None] * size, old, mask=moved & (row < 0)[:, None])
    tl.store(kept + column[:, None] * size, new, mask=moved & (row >= 0)[:, None])


@triton.jit
def unit(x, DELTA: tl.constexpr, EPS: tl.constexpr):
    """Return x, with DELTA divided by its norm."""
    if DELTA:
        x = x / tl.sqrt(tl.sum(x * x, axis=0) + EPS)
    return x


@triton.jit(do_not_specialize=["trees", "kept"])
def scan_kernel(
    q, k, v, decay, gain, states, out, owner, first, slots, advance, parents, trees, kept, scale,
    q_stride, k_stride, v_stride, slot_stride, heads, groups, keys, values,
    DELTA: tl.constexpr, EPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per head, block of columns and request, or, with `trees`, row. States are `kept`, or begin with zeros.

    Then the last row of a request that advances stands for all of its rows, and each other row goes along its path.
    """
    follow(PDL)
    head, row = tl.program_id(1), tl.program_id(0).to(tl.int64)
    request = row
    if trees:
        request = tl.load(owner + row)
    begin, end = tl.load(first + request), tl.load(first + request + 1)
    certain = tl.load(advance + request)
    whole, last, path = row == row, end - 1, end * 0
    if trees:
        whole = certain
        if not certain:
            last, node = row, row - begin
            while node >= 0:
                path |= (end * 0 + 1) << (node % MOST_NODES)
                node = tl.load(parents + begin + node).to(tl.int64)
    runs = end > begin
    if trees:
        runs = runs & (row == last)
    if runs:
        i, j = tl.arange(0, K), tl.program_id(2) * V + tl.arange(0, V)
        in_k, in_v = i < keys, j < values
        tile = i[:, None] * values + j[None, :]
        in_tile = in_k[:, None] & in_v[None, :] & (kept > 0)
        group = head // (heads // groups)
        slot = states + tl.load(slots + request, mask=kept > 0, other=0) * slot_stride + head * keys * values
        state = tl.load(slot + tile, mask=in_tile, other=0.0)
        for at in range(begin, last + 1):
            if whole | ((path >> ((at - begin) % MOST_NODES)) & 1 != 0):
                key = tl.load(k + at * k_stride + group * keys + i, mask=in_k, other=0.0).to(tl.float32)
                key = unit(key, DELTA, EPS)
                u = tl.load(v + at * v_stride + head * values + j, mask=in_v, other=0.0).to(tl.float32)
                state *= tl.load(decay + at * heads + head)
                if DELTA:
                    u -= tl.sum(state * key[:, None], axis=0)
                state += key[:, None] * (tl.load(gain + at * heads + head) * u)[None, :]
                if whole | (at == last):
                    query = tl.load(q + at * q_stride + group * keys + i, mask=in_k, other=0.0).to(tl.float32)
                    query = unit(query, DELTA, EPS) * scale
                    y = tl.sum(state * query[:, None], axis=0)
                    tl.store(out + (at * heads + head) * values + j, y, mask=in_v)
        tl.store(slot + tile, state, mask=in_tile & certain)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor | None, rows: RecurrentRows, *, silu: bool
) -> Tensor:
    """As kernels.recurrence.convolve, of x whose channels lie beside each other."""
    (count, size), taps, pdl, unused = x.shape, weight.shape[1], overlaps(x.device), rows.advance
    out, slots = torch.empty(count, size, dtype=x.dtype, device=x.device), rows.slots
    windows, stride = (unused, 0) if windows is None or slots is None else (windows, windows.stride(0))
    kept, blocks = windows is not unused, triton.cdiv(size, CHANNELS)
    pointers = x, weight.contiguous(), unused if bias is None else bias, windows, out
    tables = (
        rows.owner,
        rows.first,
        unused if slots is None else slots,
        unused if rows.parents is None else rows.parents,
    )
    variant = _convolve_variant(taps, bias is not None, kept, rows.parents is not None, silu, pdl)
    variant.launch((count, blocks), *pointers, *tables, x.stride(0), stride, size)
    if kept and taps > 1:
        arguments = x, windows, rows.first, slots, rows.advance, x.stride(0), stride, size
        _keep_variant(taps - 1, pdl).launch((len(rows.counts), blocks), *arguments)
    return out


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor, states: Tensor | None, rows: RecurrentRows, *,
    delta: bool,
) -> Tensor:  # fmt: skip
    """As kernels.recurrence.scan, of q, k and v whose rows are contiguous."""
    (count, heads, values), (_, groups, keys) = v.shape, k.shape
    out, kept = torch.empty(count, heads, values, device=v.device), states is not None and rows.slots is not None
    stride, states = (states.stride(0), states) if states is not None and kept else (0, out)
    slots = rows.first if rows.slots is None else rows.slots  # where there is none, another of the same type
    parents = rows.first.view(torch.int32) if rows.parents is None else rows.parents
    width, trees = triton.next_power_of_2(keys), rows.parents is not None
    columns = min(max(TILE // width, LEAST), triton.next_power_of_2(values))
    _scan_variant(delta, width, columns, overlaps(v.device)).launch(
        (count if trees else len(rows.counts), heads, triton.cdiv(values, columns)),
        q, k, v, decay, gain, states, out, rows.owner, rows.first, slots, rows.advance, parents, int(trees), int(kept),
        keys**-0.5 if delta else 1.0, q.stride(0), k.stride(0), v.stride(0), stride, heads, groups, keys, values,
    )  # fmt: skip
    return out


@functools.cache
def _convolve_variant(taps: int, biased: bool, kept: bool, trees: bool, silu: bool, pdl: bool) -> Variant:
    constants = {
        "TAPS": taps, "BIASED": biased, "KEPT": kept, "TREES": trees, "SILU": silu, "N": CHANNELS, "PDL": pdl,
    }  # fmt: skip
    return Variant(convolve_kernel, constants, num_warps=4, enable_fp_fusion=False, **launched(pdl))


@functools.cache
def _keep_variant(old: int, pdl: bool) -> Variant:
    constants = {"OLD": old, "P": triton.next_power_of_2(old), "N": CHANNELS, "PDL": pdl}
    return Variant(keep_kernel, constants, num_warps=4, **launched(pdl))


@functools.cache
def _scan_variant(delta: bool, keys: int, columns: int, pdl: bool) -> Variant:
    constants = {"DELTA": delta, "EPS": L2_EPS, "K": keys, "V": columns, "PDL": pdl}
    return Variant(scan_kernel, constants, num_warps=1, enable_fp_fusion=False, **launched(pdl))
