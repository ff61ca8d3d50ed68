# pyright: reportCallIssue=false, reportArgumentType=false
"""The addresses of a step's rows in one launch: a program per block of rows; for the tails of trees one per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
WORD_BITS = tl.constexpr(64)


@triton.jit
def set_bits(x):
    """Count the set bits of int64."""
    x -= (x >> 1) & 0x5555555555555555
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    return (x + (x >> 32)) & 127


@triton.jit(do_not_specialize=["count", "padded", "width", "shift", "first_offset", "stride"])
def plan_rows(
    table, stride, requests, starts, offsets, masks, out, narrow, count, padded, width, shift, first_offset,
    PAGE: tl.constexpr, GRID: tl.constexpr, TREE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the addresses of `count` rows. out [5, padded] int64: places, slots and, with GRID, request, committed
    and offset. narrow [2, padded] int32: committed, ends.

    Rows are those of AttentionRows, or with GRID `width` of each request.
    """
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    inside = row < count
    if GRID:
        owner = row // width
        offset = row % width + first_offset
    else:
        owner = row
        offset = tl.load(offsets + row, mask=inside, other=0)
    request = tl.load(requests + owner, mask=inside, other=0)
    committed = tl.load(starts + owner, mask=inside, other=0) + shift
    place = committed + offset
    page = tl.load(table + request * stride + place // PAGE, mask=inside, other=0)
    end = place + 1
    if TREE:
        end = committed + set_bits(tl.load(masks + row, mask=inside, other=0))
    tl.store(out + row, place, mask=inside)
    tl.store(out + padded + row, page * PAGE + place % PAGE, mask=inside)
    if GRID:
        tl.store(out + 2 * padded + row, request, mask=inside)
        tl.store(out + 3 * padded + row, committed, mask=inside)
        tl.store(out + 4 * padded + row, offset, mask=inside)
    tl.store(narrow + row, committed.to(tl.int32), mask=inside)
    tl.store(narrow + padded + row, end.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["stride", "pages"])
def plan_tails(
    table, stride, pages, request, committed, masks, out, TILE: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    row, index, bit = tl.program_id(0).to(tl.int64), tl.arange(0, LINES), tl.arange(0, WORD_BITS).to(tl.int64)
    start, mask = tl.load(committed + row), tl.load(masks + row)
    position = start // TILE * TILE + index
    past = tl.minimum(tl.maximum(position - start, 0), WORD_BITS - 1)
    rank = set_bits(mask & ((tl.full([WORD_BITS], 1, tl.int64) << bit) - 1))
    nth = ((mask >> bit) & 1 != 0)[None, :] & (rank[None, :] == past[:, None])
    place = tl.where(position < start, position, start + tl.sum(tl.where(nth, bit[None, :], 0), axis=1))
    inside = index < TAIL
    column = tl.minimum(place // PAGE, pages - 1)
    page = tl.load(table + tl.load(request + row) * stride + column, mask=inside, other=0)
    tl.store(out + row * TAIL + index, page * PAGE + place % PAGE, mask=inside)


def grid(
    table: Tensor,
    requests: Tensor,
    start: Tensor,
    width: int,
    shift: int,
    offset: int,
    words: Tensor | None,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return request, committed, offset and addresses of AttentionRows.grid."""
    count = len(start) * width
    out, narrow = _launch(table, requests, start, start, words, count, width, shift, offset, page_size, grid=True)
    places, slots, request, committed, offsets = out
    return request, committed, offsets, (places, slots, *narrow)


def addresses(
    table: Tensor, request: Tensor, committed: Tensor, offset: Tensor, tree_mask: Tensor | None, page_size: int
) -> tuple[Tensor, ...]:
    """Return the fields of Addresses, from those of AttentionRows."""
    out, narrow = _launch(table, request, committed, offset, tree_mask, len(request), 1, 0, 0, page_size, grid=False)
    return *out, *narrow


def tails(table: Tensor, request: Tensor, committed: Tensor, tree_mask: Tensor, page_size: int, tile: int) -> Tensor:
    """As AttentionRows.tails."""
    count, tail = len(request), tile + WORD_BITS.value
    out = torch.empty(count, tail, dtype=torch.int64, device=table.device)
    plan_tails[count,](
        table, table.stride(0), table.shape[1], request, committed, tree_mask, out,
        TILE=tile, TAIL=tail, PAGE=page_size, LINES=triton.next_power_of_2(tail),
    )  # fmt: skip
    return out


def _launch(
    table: Tensor,
    requests: Tensor,
    starts: Tensor,
    offsets: Tensor,
    words: Tensor | None,
    count: int,
    width: int,
    shift: int,
    offset: int,
    page_size: int,
    *,
    grid: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    assert table.stride(1) == 1, "a request's pages lie beside each other"
    padded = -(-count // 4) * 4  # so that every field begins at a multiple of 16 bytes
    out = torch.empty(5 if grid else 2, padded, dtype=torch.int64, device=table.device)
    narrow = torch.empty(2, padded, dtype=torch.int32, device=table.device)
    plan_rows[triton.cdiv(count, BLOCK),](
        table, table.stride(0), requests, starts, offsets, words, out, narrow, count, padded, width, shift, offset,
        PAGE=page_size, GRID=grid, TREE=words is not None, N=BLOCK,
    )  # fmt: skip
    return list(out[:, :count]), list(narrow[:, :count])
