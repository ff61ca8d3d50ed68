# pyright: reportCallIssue=false, reportArgumentType=false
"""Paged attention on a GPU, by arXiv 2307.08691's recurrence: plain decoding, chains, trees and prefill chunks.

Keys are processed in tiles of fixed size at fixed positions, tiles form splits of fixed size, and a row's splits are
merged in order. Every tile is one matrix product of one shape, whose lines are the query heads of one KV head times as
many rows of a request as fit, so a key is read once for all of them. A masked key weighs exactly zero, and so does a
tile or split of masked keys only: the keys that neighbouring rows see do not affect a row's bits. Nor do their values,
which are finite in the cache whatever the model computes (kernels/copies.py).

If a value is part of its key, its D numbers are read once for both, and the REST of the key adds a second product to
the scores. As many heads as fit the lines then count as those of one KV head, of which all have the same keys.

    attend   (block of rows, KV head, some of the splits): the keys that a block's rows share: all of them, or for a
             tree the full tiles below the committed end. With WHOLE one program processes and merges all splits and,
             except for a tree, writes the output.
    branch   (row, KV head), trees only: continues with the remaining committed keys and the row's ancestors, gathered
             in order of position as in plain decoding.
    combine  (row, head): merges the splits of each row.

A split's state is (peak, sum, out): largest score, sum of weights and weighted values, both relative to the peak. Sums
run inside matrix products, whose order along K does not depend on how a compiler lays out a tile; multiplication and
addition are never fused, since that too would be the compiler's choice.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.copies import write_kv
from kernels.operands import QKNorm
from kernels.rotary import rotate_and_write
from kernels.rows import WORD_BITS, AttentionRows
from kernels.triton import INTERPRETED
from kernels.triton.attention_tiles import (
    LATENT_LINES,
    Blocking,
    blocking,
    merges_itself,
    row_blocks,
    split_programs,
    warps_of_attend,
)
from kernels.triton.dependent import follow, launched, load_ahead, overlaps, prefetch
from kernels.triton.device import limits
from kernels.triton.launch import Variant

LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1e30)  # below every score and finite, so that a state without keys gives no NaN
SUM_WIDTH = tl.constexpr(16)  # width of the narrowest product: the sums of weights, in equal columns
AHEAD = 8  # states that `combine` reads at once


@triton.jit
def add_tile(
    q, rest, peak, total, out, keys, values, slot, in_tile, mask, scale, D: tl.constexpr, REST: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Add a tile to a state: q `[M, D']`, slot and in_tile `[T]`, mask `[M, T]`, keys and values at their KV head.

    With REST, `rest` `[M, REST]` are the queries' last numbers, and values are the first D numbers of keys.
    """
    d = tl.arange(0, q.shape[1])
    inside = d < D
    k = tl.load(keys + slot[None, :] * (D + REST) + d[:, None], mask=in_tile[None, :] & inside[:, None], other=0.0)
    if REST:
        v = tl.trans(k)
    else:
        v = tl.load(values + slot[:, None] * D + d[None, :], mask=in_tile[:, None] & inside[None, :], other=0.0)
    if UPCAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    else:
        k, v = k.to(q.dtype), v.to(q.dtype)  # for an fp8 cache
    products = tl.dot(q, k, input_precision="ieee")
    if REST:
        e = D + tl.arange(0, REST)
        last = tl.load(keys + slot[None, :] * (D + REST) + e[:, None], mask=in_tile[None, :], other=0.0)
        products = tl.dot(rest, last.to(rest.dtype), products, input_precision="ieee")
    scores = tl.where(mask, products * scale, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None]).to(v.dtype)
    decay = tl.exp2(peak - highest)[:, None]
    ones = tl.full([slot.shape[0], SUM_WIDTH], 1.0, v.dtype)
    total = tl.dot(weights, ones, total * decay, input_precision="ieee")
    out = tl.dot(weights, v, out * decay, input_precision="ieee")
    return highest, total, out


@triton.jit
def load_queries(
    q, row_index, q_stride, head, valid, D: tl.constexpr, D_PADDED: tl.constexpr, REST: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return the queries `[M, D']` and their last numbers `[M, REST]`, without REST the queries again."""
    d, query = tl.arange(0, D_PADDED), q + row_index * q_stride + head * (D + REST)
    queries = tl.load(query[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    rest = queries
    if REST:
        rest = tl.load(query[:, None] + (D + tl.arange(0, REST))[None, :], mask=valid[:, None], other=0.0)
        rest = rest.to(queries.dtype)
    return queries, rest


@triton.jit
def prefetch_tile(
    keys, values, page_ids, tile, start, stop, D: tl.constexpr, D_PADDED: tl.constexpr, REST: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fetch a tile into L2, where even what the kernel ahead is writing may be fetched: no copy of it goes stale."""
    WIDTH: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes, which L2 fetches
    COUNT: tl.constexpr = (D_PADDED + WIDTH - 1) // WIDTH
    position = tile + tl.arange(0, TILE)
    page = load_ahead(page_ids + position // PAGE, mask=(position < stop) & (position >= start), other=0).to(tl.int64)
    column = tl.minimum(tl.arange(0, COUNT) * WIDTH, D - 1)
    place = (page * PAGE + position % PAGE)[:, None] * (D + REST) + column[None, :]
    prefetch(keys + place)
    if not REST:
        prefetch(values + place)


@triton.jit
def merge(peak, total, out, other_peak, other_total, other_out):
    """Merge two states `[M]`, `[M, 1 or more]`, `[M, D']`, the later one second; or `[]`, `[]`, `[D']`."""
    highest = tl.maximum(peak, other_peak)
    decay, other_decay = tl.exp2(peak - highest), tl.exp2(other_peak - highest)
    if len(peak.shape):
        decay, other_decay = decay[:, None], other_decay[:, None]
    return highest, total * decay + other_total * other_decay, out * decay + other_out * other_decay


@triton.jit
def merge_sink(peak, total, out, sinks, head):
    """Merge a state and the sinks of `head` `[M]` or `[]`, each as of a key whose value is zero."""
    return merge(peak, total, out, tl.load(sinks + head).to(tl.float32) * LOG2_E, 1.0, 0.0)


@triton.jit
def store_state(states, outs, index, valid, peak, total, out, D: tl.constexpr):
    """Store a state. `index` `[M]`: index into `states` `[.., 2]` and `outs` `[.., D]`."""
    d = tl.arange(0, out.shape[1])
    tl.store(states + index * 2, peak, mask=valid)
    tl.store(states + index * 2 + 1, tl.max(total, 1), mask=valid)
    tl.store(outs + index[:, None] * D + d[None, :], out, mask=valid[:, None] & (d < D)[None, :])


@triton.jit
def store_output(attn_out, index, valid, total, out, D: tl.constexpr):
    """Normalize and store the output. `index` `[M]`: row * heads + head."""
    d = tl.arange(0, out.shape[1])
    total = tl.where(valid, tl.max(total, 1), 1.0)[:, None]
    pointers = attn_out + index[:, None] * D + d[None, :]
    tl.store(pointers, (out / total).to(attn_out.dtype.element_ty), mask=valid[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["slots", "pages", "num_states", "first", "window"])
def attend(
    q,
    cache,
    table,
    request,
    committed,
    ends,
    blocks,
    states,
    outs,
    attn_out,
    sinks,
    q_stride,
    slots,
    pages,
    num_states,
    first,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    REST: tl.constexpr,
    PAGE: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    # ahead of the wait: which rows, keys and pages, which the step computes before its layers; the kernel ahead has
    # written the queries, and to the cache the keys of the step's own rows
    block, kv_head, part, parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    row0, count = load_ahead(blocks + 2 * block), load_ahead(blocks + 2 * block + 1)
    line = tl.arange(0, LINES)
    row, head = row0 + line // GROUP, kv_head * GROUP + line % GROUP
    valid = line // GROUP < count
    end = load_ahead(ends + row, mask=valid, other=0)  # [M] number of keys that a row sees, from position 0 on
    if TREE:
        last = load_ahead(committed + row0)
        stop, lowest_end = last // TILE * TILE, last + 1
    else:
        stop, lowest_end = load_ahead(ends + row0 + count - 1), load_ahead(ends + row0)
    start = first
    lower = tl.zeros([LINES], tl.int32) + first  # [M] first key that a row sees
    if WINDOW:
        start = tl.maximum(first, lowest_end - window)
        lower = tl.maximum(lower, end - window)
    slots = slots.to(tl.int64)
    keys, values = cache, cache
    if not REST:
        keys, values = cache + kv_head * slots * D, cache + (KV_HEADS + kv_head) * slots * D
    page_ids = table + load_ahead(request + row0) * pages
    first_split, last_split = start // SPLIT + part, tl.cdiv(stop, SPLIT)
    if PDL:
        tile_start = tl.maximum(first_split * SPLIT, start // TILE * TILE)
        prefetch_tile(keys, values, page_ids, tile_start, start, stop, D, D_PADDED, REST, PAGE, TILE)
    follow(PDL)
    row_index = row.to(tl.int64)
    queries, rest = load_queries(q, row_index, q_stride, head, valid, D, D_PADDED, REST, UPCAST)
    out_index = row_index * (KV_HEADS * GROUP) + head
    state_index = out_index * num_states
    all_peak = tl.full([LINES], LOWEST, tl.float32)
    all_total = tl.zeros([LINES, SUM_WIDTH], tl.float32)
    all_out = tl.zeros([LINES, D_PADDED], tl.float32)
    for split in range(first_split, last_split, parts):
        peak = tl.full([LINES], LOWEST, tl.float32)
        total = tl.zeros([LINES, SUM_WIDTH], tl.float32)
        out = tl.zeros([LINES, D_PADDED], tl.float32)
        tile_start = tl.maximum(split * SPLIT, start // TILE * TILE)
        for tile in range(tile_start, tl.minimum(stop, (split + 1) * SPLIT), TILE):
            position = tile + tl.arange(0, TILE)
            in_tile = (position < stop) & (position >= start)
            page = tl.load(page_ids + position // PAGE, mask=in_tile, other=0).to(tl.int64)
            mask = (position[None, :] < end[:, None]) & (position[None, :] >= lower[:, None]) & in_tile[None, :]
            slot = page * PAGE + position % PAGE
            peak, total, out = add_tile(
                queries, rest, peak, total, out, keys, values, slot, in_tile, mask, scale, D, REST, UPCAST
            )
        if not WHOLE:
            store_state(states, outs, state_index + split, valid, peak, total, out, D)
        elif TREE:
            if (split + 1) * SPLIT > stop:  # `branch` continues this split
                store_state(states, outs, state_index + 1, valid, peak, total, out, D)
            else:
                all_peak, all_total, all_out = merge(all_peak, all_total, all_out, peak, total, out)
        else:
            all_peak, all_total, all_out = merge(all_peak, all_total, all_out, peak, total, out)
    if WHOLE:
        if TREE:
            store_state(states, outs, state_index, valid, all_peak, all_total, all_out, D)
        else:
            if SINKS:
                all_peak, all_total, all_out = merge_sink(all_peak, all_total, all_out, sinks, head)
            store_output(attn_out, out_index, valid, all_total, all_out, D)


@triton.jit(do_not_specialize=["slots", "num_states", "first", "window"])
def branch(
    q,
    cache,
    committed,
    ends,
    tail_slots,
    states,
    outs,
    q_stride,
    slots,
    num_states,
    first,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    REST: tl.constexpr,
    TAIL: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, d = tl.arange(0, LINES), tl.arange(0, D_PADDED)
    valid, head = line < GROUP, kv_head * GROUP + line
    end, begin = load_ahead(ends + row), load_ahead(committed + row) // TILE * TILE  # as in `attend`
    follow(PDL)
    lower = first
    if WINDOW:
        lower = tl.maximum(first, end - window)
    queries, rest = load_queries(q, row, q_stride, head, valid, D, D_PADDED, REST, UPCAST)
    slots = slots.to(tl.int64)
    keys, values = cache, cache
    if not REST:
        keys, values = cache + kv_head * slots * D, cache + (KV_HEADS + kv_head) * slots * D
    state_base = (row * (KV_HEADS * GROUP) + head) * num_states
    if WHOLE:
        state_base += 1 - begin // SPLIT
    for split in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
        tile_start = tl.maximum(begin, split * SPLIT)
        resumed = valid & (tile_start > split * SPLIT)
        index = state_base + split
        peak = tl.load(states + index * 2, mask=resumed, other=LOWEST)
        total = tl.load(states + index * 2 + 1, mask=resumed, other=0.0)[:, None] + tl.zeros([1, SUM_WIDTH], tl.float32)
        state_mask = resumed[:, None] & (d < D)[None, :]
        out = tl.load(outs + index[:, None] * D + d[None, :], mask=state_mask, other=0.0)
        for tile in range(tile_start, tl.minimum(end, (split + 1) * SPLIT), TILE):
            position = tile + tl.arange(0, TILE)
            in_tile = (position < end) & (position >= lower)
            slot = tl.load(tail_slots + row * TAIL + position - begin, mask=in_tile, other=0)
            mask = in_tile[None, :] & valid[:, None]
            peak, total, out = add_tile(
                queries, rest, peak, total, out, keys, values, slot, in_tile, mask, scale, D, REST, UPCAST
            )
        store_state(states, outs, index, valid, peak, total, out, D)


@triton.jit(do_not_specialize=["num_states", "first", "window"])
def combine(
    states,
    outs,
    committed,
    ends,
    attn_out,
    sinks,
    num_states,
    first,
    window,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D_PADDED)
    end, inside = load_ahead(ends + row), d < D  # as in `attend`
    start, stop = first // SPLIT, tl.cdiv(end, SPLIT)
    if WINDOW:
        start = tl.maximum(first, end - window) // SPLIT
    if WHOLE:  # a tree: the state that `attend` merged, then those that `branch` continued
        start, stop = start * 0, stop - load_ahead(committed + row) // SPLIT + 1
    follow(PDL)
    out_index = row * HEADS + head
    peak, total = tl.full([], LOWEST, tl.float32), tl.full([], 0.0, tl.float32)
    out = tl.zeros([D_PADDED], tl.float32)
    for block in range(start, stop, AHEAD):
        # merged in the order of `attend`, but no load depends on it: those of a block are under way at once
        for ahead in tl.static_range(AHEAD):
            index = block + ahead
            valid, state_index = index < stop, out_index * num_states + index
            other_peak = tl.load(states + state_index * 2, mask=valid, other=LOWEST)
            other_total = tl.load(states + state_index * 2 + 1, mask=valid, other=0.0)
            other_out = tl.load(outs + state_index * D + d, mask=valid & inside, other=0.0)
            peak, total, out = merge(peak, total, out, other_peak, other_total, other_out)
    if SINKS:
        peak, total, out = merge_sink(peak, total, out, sinks, head)
    tl.store(attn_out + out_index * D + d, (out / total).to(attn_out.dtype.element_ty), mask=inside)


class TritonAttention:
    """The plan of one step. `shape` and `whole` are for tests; the defaults suit the sizes and give the same bits.

    The cache's dtype may differ from q's: fp8 keys and values (e4m3, without a scale) are widened when they are read.
    """

    def __init__(
        self,
        rows: AttentionRows,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
        *,
        shape: Blocking | None = None,
        whole: bool | None = None,
    ) -> None:
        device, group, self._rest = rows.table.device, num_heads // num_kv_heads, 0
        if value_dim is not None:
            head_dim, self._rest = value_dim, head_dim - value_dim
            group = math.gcd(num_heads, shape.lines if shape else LATENT_LINES)
            num_kv_heads = num_heads // group
        self._shape = shape = shape or blocking(head_dim, dtype, group, limits(device))
        nodes = shape.lines // group
        self._blocks = blocks = row_blocks(rows.counts, nodes, device)
        self._tree = rows.tree_mask is not None
        splits = -(-rows.longest // shape.split)
        programs = len(blocks) * num_kv_heads
        if whole is None:
            whole = merges_itself(programs, head_dim, dtype, self._tree, limits(device))
        self._whole = whole
        self._table, self._first, self._page_size = rows.table, rows.first, rows.page_size
        self._request, (_, self._slots, self._committed, self._ends) = rows.request, rows.addresses
        self._tail_slots = self._slots if rows.tree_mask is None else rows.tails(shape.tile)
        count = rows.request.shape[0]
        tail_splits = 1 - (1 - shape.tile - WORD_BITS) // shape.split  # most splits that `branch` writes for a row
        num_states = splits if not whole else 1 + tail_splits
        states = count if self._tree or not whole else 0
        self._states = torch.empty(states, num_heads, num_states, 2, device=device)
        self._outs = torch.empty(states, num_heads, num_states, head_dim, device=device)
        self._sizes = num_heads, num_kv_heads, head_dim
        self._grid = (len(blocks), num_kv_heads, 1 if whole else split_programs(programs, splits, limits(device)))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, scale: float, window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        write_kv(cache, self._slots, k, v)
        return self.read(q, cache, scale, window, sinks)

    def project(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], norm: QKNorm | None, cache: Tensor, scale: float,
        window: int | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `__call__`, from a layer's raw projections `[R, nh + 2 nkv, D]` (kernels/rotary.py)."""
        num_heads = qkv.shape[1] - 2 * cache.shape[1]
        q = rotate_and_write(qkv, *rotary, norm, self._slots, cache, num_heads)
        return self.read(q, cache, scale, window, sinks)

    def read(
        self, q: Tensor, cache: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """As `__call__`, with the rows' keys and values already in the cache. q's rows may have any stride.

        The kernel launched before must not be the one that computed the rows' addresses (kernels/triton/dependent.py).
        """
        attended, continued, combined = _variants(
            self._shape, *self._sizes, self._rest, self._page_size, q.dtype, cache.dtype, self._whole, self._tree,
            window is not None, sinks is not None, self._tail_slots.shape[-1] if self._tree else 0,
            self._outs.shape[2] > 1, overlaps(q.device),
        )  # fmt: skip
        heads, kv_heads, dim = self._sizes
        scale *= math.log2(math.e)
        num_states, rows = self._outs.shape[2], q.shape[0]
        bounds = self._first, window or 0
        attn_out = q.new_empty(rows, heads * dim)
        sinks = q if sinks is None else sinks  # read by no kernel
        attended.launch(
            self._grid, q, cache, self._table, self._request, self._committed, self._ends, self._blocks, self._states,
            self._outs, attn_out, sinks, q.stride(0), cache.shape[2], self._table.stride(0), num_states, *bounds, scale,
        )  # fmt: skip
        if self._tree:
            continued.launch(
                (rows, kv_heads), q, cache, self._committed, self._ends, self._tail_slots, self._states, self._outs,
                q.stride(0), cache.shape[2], num_states, *bounds, scale,
            )  # fmt: skip
        if self._tree or not self._whole:
            combined.launch(
                (rows, heads), self._states, self._outs, self._committed, self._ends, attn_out, sinks, num_states,
                *bounds,
            )  # fmt: skip
        return attn_out


@functools.cache
def _variants(
    shape: Blocking, heads: int, kv_heads: int, dim: int, rest: int, page: int, dtype: torch.dtype, cache: torch.dtype,
    whole: bool, tree: bool, windowed: bool, sinks: bool, tail: int, several: bool, pdl: bool,
) -> tuple[Variant, Variant, Variant]:  # fmt: skip
    """Return the kernels of a plan's layers: `attend`, `branch` and `combine`. `several`: states of a row."""
    padded = triton.next_power_of_2(dim)
    common = {"D": dim, "D_PADDED": padded, "SPLIT": shape.split, "WHOLE": whole, "WINDOW": windowed, "PDL": pdl}
    products = {
        "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "LINES": shape.lines, "TILE": shape.tile, "REST": rest,
        "UPCAST": dtype == torch.bfloat16 and INTERPRETED,
    }  # fmt: skip
    merging = {"HEADS": heads, "AHEAD": AHEAD if several else 1, "SINKS": sinks}
    options = {"enable_fp_fusion": False, **launched(pdl)}
    staged = {"num_stages": shape.stages, **options}
    warps = warps_of_attend(shape, dim, whole, tree, cache)
    return (
        Variant(attend, {**common, **products, "PAGE": page, "TREE": tree, "SINKS": sinks}, num_warps=warps, **staged),
        Variant(branch, {**common, **products, "TAIL": tail}, num_warps=shape.warps, **staged),
        Variant(combine, {**common, **merging}, num_warps=1, **options),
    )
