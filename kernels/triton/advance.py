# pyright: reportCallIssue=false, reportArgumentType=false
"""Advances requests past a verify in Triton: one program per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import LEADING, Nodes, Progress
from kernels.triton.rows import set_bits
from kernels.triton.verify import last_of_path
from kernels.verify import Accepted

COLUMNS = tl.constexpr(LEADING)


@triton.jit
def store_tokens(out, rank, drafted, on_path, steps, bonus, nodes, after, N: tl.constexpr):
    """Store the tokens of a path without its root, the bonus token, and zeros after it."""
    tl.store(out + rank - 1, drafted, mask=on_path & (rank > 0))
    tl.store(out + steps, bonus)
    tl.store(out + nodes, tl.zeros([N], tl.int64), mask=after)


@triton.jit(do_not_specialize=["shape_stride", "table_stride", "ids_stride", "nodes_per_tree", "width", "capacity"])
def advance_kernel(
    token, parent, depth, ancestors, length, choice, shape_stride, table, table_stride, slots, roots, limit, ids,
    ids_stride, first, last, results, moves, nodes_per_tree, width, capacity,
    N: tl.constexpr, PAGE: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    row, nodes = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    shape, places = row * shape_stride + nodes, row * nodes_per_tree + nodes
    count = tl.minimum(tl.load(length + row), nodes_per_tree)
    end = last_of_path(
        token + places, parent + shape, depth + shape, ancestors + shape, choice + row * nodes_per_tree, token, nodes,
        count, N, False,
    )  # fmt: skip
    mask = tl.load(ancestors + row * shape_stride + end)
    on_path = (nodes < nodes_per_tree) & ((mask >> nodes.to(tl.int64)) & 1 != 0)
    rank = set_bits(mask & ((tl.full([N], 1, tl.int64) << nodes.to(tl.int64)) - 1))
    steps = set_bits(mask) - 1  # accepted tokens
    bonus = tl.load(choice + row * nodes_per_tree + end)
    drafted = tl.load(token + places, mask=on_path, other=0)
    result = results + row * (COLUMNS + 2 * capacity)
    tl.store(result, tl.load(length + row) - 1)
    depths = tl.load(depth + shape, mask=nodes < count, other=0).to(tl.int64)
    tl.store(result + 1, tl.max(depths, axis=0))
    tl.store(result + 2, steps)
    after = (nodes > steps) & (nodes < width)  # the end of a row, past the path
    store_tokens(result + COLUMNS, rank, drafted, on_path, steps, bonus, nodes, after, N)
    store_tokens(ids + row * ids_stride, rank, drafted, on_path, steps, tl.maximum(bonus, 0), nodes, after, N)
    path = result + COLUMNS + capacity
    tl.store(path + rank, nodes.to(tl.int64), mask=on_path)
    tl.store(path + nodes, tl.zeros([N], tl.int64), mask=after)
    root = tl.load(roots + row)
    if MOVES:
        pages, rows = table + tl.load(slots + row) * table_stride, tl.num_programs(0)
        place = root + nodes
        slot = tl.load(pages + place // PAGE, mask=on_path | (nodes < width), other=0) * PAGE + place % PAGE
        source, destination = moves + row * width, moves + (rows + row) * width
        tl.store(source + rank, slot, mask=on_path)
        tl.store(source + nodes, slot, mask=after)
        tl.store(destination + nodes, slot, mask=nodes < width)
    tl.store(first + row, root + 1)
    tl.store(last + row, steps)
    tl.store(roots + row, tl.minimum(root + steps + 1, tl.load(limit + row)))


def advance(
    nodes: Nodes, choice: Tensor, progress: Progress, table: Tensor, page_size: int, *, width: int, is_chain: bool
) -> Accepted:
    """As kernels.advance.advance."""
    token, parent, depth, ancestors, length = nodes
    slots, roots, limit, ids, first, last, results = progress
    batch, per_tree = token.shape
    shape_stride = parent.stride(0)
    assert all(field.stride() == (shape_stride, 1) for field in (parent, depth, ancestors))
    assert token.is_contiguous()
    assert choice.is_contiguous()
    assert results.is_contiguous()
    assert ids.stride(1) == 1
    moves = torch.empty(2, 0 if is_chain else batch * width, dtype=torch.int64, device=token.device)
    capacity = (results.shape[1] - LEADING) // 2
    advance_kernel[batch,](
        token, parent, depth, ancestors, length, choice, shape_stride, table, table.stride(0), slots, roots, limit, ids,
        ids.stride(0), first, last, results, moves, per_tree, width, capacity,
        N=triton.next_power_of_2(max(per_tree, width)), PAGE=page_size, MOVES=not is_chain, num_warps=1,
    )  # fmt: skip
    tokens, path = results[:, LEADING : LEADING + width], results[:, LEADING + capacity : LEADING + capacity + width]
    return Accepted(tokens, path, results[:, 2], None if is_chain else (moves[0], moves[1]))
