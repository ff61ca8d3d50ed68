# pyright: reportCallIssue=false, reportArgumentType=false
"""Verification of draft trees in Triton: one program per request, all nodes in parallel, no tree walk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["width"])
def last_accepted(
    token, parent, depth, ancestors, length, choice, typical_mask, out, width, N: tl.constexpr, TYPICAL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, N)
    inside = nodes < tl.minimum(tl.load(length + row), width)
    places = row * width + nodes
    parent_node = tl.maximum(tl.load(parent + places, mask=inside, other=0), 0)
    expected = tl.load(choice + row * width + parent_node, mask=inside, other=-1).to(tl.int64)
    ok = (nodes == 0) | (tl.load(token + places, mask=inside, other=-2).to(tl.int64) == expected)
    if TYPICAL:
        ok |= tl.load(typical_mask + places, mask=inside, other=0) != 0
    ok &= inside
    word = tl.sum(tl.where(ok, tl.full((N,), 1, tl.int64) << nodes.to(tl.int64), 0), axis=0)
    alive = inside & ((tl.load(ancestors + places, mask=inside, other=0) & ~word) == 0)
    reached = tl.where(alive, tl.load(depth + places, mask=inside, other=0).to(tl.int32), -1)
    tl.store(out + row, tl.min(tl.where(reached == tl.max(reached, axis=0), nodes, N), axis=0).to(tl.int64))


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
