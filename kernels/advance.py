"""Advances requests past a verify without the host: what is accepted, emitted and moved, and where they go on.

One launch on a GPU (kernels/triton/advance.py), where torch needs some thirty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.triton import in_use
from kernels.verify import Accepted, accept, accepted_path

FIELDS = 3  # columns of a result row before its tokens: drafted nodes, depth of the deepest, accepted tokens


class Nodes(NamedTuple):
    """The fields of a DraftTree, which for chains may be expanded from one row."""

    token: Tensor  # [B, N] int64
    parent: Tensor  # [B, N] int32
    depth: Tensor  # [B, N] int32
    ancestors: Tensor  # [B, N] int64
    length: Tensor  # [B]


class Progress(NamedTuple):
    """B requests between two steps, int64; `advance` writes all but `slots` and `limit`.

    Of a path of length n the first n entries of `ids` and of both halves of a result row count; up to the width of the
    tree the others become 0.
    """

    slots: Tensor  # [B] rows of the block table
    roots: Tensor  # [B] the root's position
    limit: Tensor  # [B] the root goes no further
    ids: Tensor  # [B, >= W] the emitted tokens, which a head reads next
    first: Tensor  # [B] position of the first of them
    last: Tensor  # [B] index of the last of them
    results: Tensor  # [B, FIELDS + 2 W] the columns above, then tokens and path, which begins with the root


def advance(
    nodes: Nodes, choice: Tensor, progress: Progress, table: Tensor, page_size: int, *, width: int, is_chain: bool
) -> Accepted:
    """Accept by the exact rule and advance the requests; `choice` `[B, N]`: the target's choice at every node.

    `width` <= W bounds the length of a path. For trees also returns the slots `[B * width]` from and to which the
    accepted KV moves; those of other nodes stay where they are. The host does not wait for the device.
    """
    if in_use(choice.device):
        from kernels.triton import advance as gpu

        return gpu.advance(nodes, choice, progress, table, page_size, width=width, is_chain=is_chain)
    token, parent, depth, ancestors, length = nodes
    slots, roots, limit, ids, first, last, results = progress
    deepest = accept(token, parent, depth, ancestors, length, choice)
    accepted = accepted_path(token, None if is_chain else ancestors, deepest, choice, width)
    index = torch.arange(width, device=choice.device)
    moves = None
    if not is_chain:
        from_place = roots[:, None] + torch.where(index <= accepted.depth[:, None], accepted.path, index)
        places = torch.stack([from_place, roots[:, None] + index])  # [2, B, W]
        pages = table[slots].gather(1, (places // page_size).transpose(0, 1).flatten(1))
        pages = pages.unflatten(1, (2, width)).transpose(0, 1)
        source, destination = (pages * page_size + places % page_size).flatten(1)
        moves = source, destination
    inside = torch.arange(token.shape[1], device=token.device) < length[:, None]
    results[:, 0] = length - 1
    results[:, 1] = depth.masked_fill(~inside, 0).amax(1)
    results[:, 2] = accepted.depth
    tokens = (results.shape[1] - FIELDS) // 2
    results[:, FIELDS : FIELDS + width] = ids[:, :width] = accepted.token
    results[:, FIELDS + tokens : FIELDS + tokens + width] = accepted.path
    first.copy_(roots + 1)
    last.copy_(accepted.depth)
    roots.copy_(torch.minimum(roots + accepted.depth + 1, limit))
    return accepted._replace(moves=moves)
