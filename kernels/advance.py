"""Advances requests past a verify without the host: what is accepted, emitted and moved, and where they go on.

One launch on a GPU (kernels/triton/advance.py), where torch needs some thirty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.operands import LEADING, Nodes, Progress
from kernels.verify import Accepted, accept, accepted_path


def advance(
    nodes: Nodes, choice: Tensor, progress: Progress, table: Tensor, page_size: int, *, width: int, is_chain: bool
) -> Accepted:
    """Accept by the exact rule and advance the requests; `choice` `[B, N]`: the target's choice at every node.

    Where no token could be chosen the result is -1, and what goes on from there any token: the host will end it.
    `width` <= W bounds the length of a path. For trees also returns the slots `[B * width]` from and to which the
    accepted KV moves; those of other nodes stay where they are. The host does not wait for the device.
    """
    if uses_triton(choice.device):
        from kernels.triton import advance as gpu

        return gpu.advance(nodes, choice, progress, table, page_size, width=width, is_chain=is_chain)
    token, _, depth, ancestors, length = nodes
    slots, roots, limit, ids, first, last, results = progress
    deepest = accept(nodes, choice)
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
    tokens = (results.shape[1] - LEADING) // 2
    results[:, LEADING : LEADING + width], ids[:, :width] = accepted.token, accepted.token.clamp(min=0)
    results[:, LEADING + tokens : LEADING + tokens + width] = accepted.path
    first.copy_(roots + 1)
    last.copy_(accepted.depth)
    roots.copy_(torch.minimum(roots + accepted.depth + 1, limit))
    return accepted._replace(moves=moves)
