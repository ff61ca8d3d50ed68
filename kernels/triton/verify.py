# pyright: reportCallIssue=false, reportArgumentType=false
"""Verification of draft trees in Triton: one program per request, all nodes in parallel, no tree walk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def last_of_path(
    token, parent, depth, ancestors, choice, typical_mask, nodes, count, N: tl.constexpr, TYPICAL: tl.constexpr
):
    """Return the last accepted node of one tree of `count` nodes; pointers [N] to its fields, `choice` to its first."""
    inside = nodes < count
    parent_node = tl.maximum(tl.load(parent, mask=inside, other=0), 0)
    expected = tl.load(choice + parent_node, mask=inside, other=-1).to(tl.int64)
    ok = (nodes == 0) | (tl.load(token, mask=inside, other=-2).to(tl.int64) == expected)
    if TYPICAL:
        ok |= tl.load(typical_mask, mask=inside, other=0) != 0
    ok &= inside
    word = tl.sum(tl.where(ok, tl.full((N,), 1, tl.int64) << nodes.to(tl.int64), 0), axis=0)
    alive = inside & ((tl.load(ancestors, mask=inside, other=0) & ~word) == 0)
    reached = tl.where(alive, tl.load(depth, mask=inside, other=0).to(tl.int32), -1)
    return tl.min(tl.where(reached == tl.max(reached, axis=0), nodes, N), axis=0)


@triton.jit(do_not_specialize=["width"])
def last_accepted(
    token, parent, depth, ancestors, length, choice, typical_mask, out, width, N: tl.constexpr, TYPICAL: tl.constexpr
):
    row, nodes = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    places, count = row * width + nodes, tl.minimum(tl.load(length + row), width)
    last = last_of_path(
        token + places, parent + places, depth + places, ancestors + places, choice + row * width,
        typical_mask + places, nodes, count, N, TYPICAL,
    )  # fmt: skip
    tl.store(out + row, last.to(tl.int64))


def accept(
    token: Tensor,
    parent: Tensor,
    depth: Tensor,
    ancestors: Tensor,
    length: Tensor,
    choice: Tensor,
    typical_mask: Tensor | None = None,
) -> Tensor:
    """As kernels.verify.accept, on one device."""
    batch, width = token.shape
    out = torch.empty(batch, dtype=torch.int64, device=token.device)
    inputs = (token, parent, depth, ancestors, length, choice, token if typical_mask is None else typical_mask)
    tensors, nodes = (x.contiguous() for x in inputs), triton.next_power_of_2(width)
    last_accepted[batch,](*tensors, out, width, N=nodes, TYPICAL=typical_mask is not None, num_warps=1)
    return out
