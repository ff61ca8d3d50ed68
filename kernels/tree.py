"""Draft trees as they grow, for a batch of requests, and the best nodes of the trees that have grown.

A level is grown from the M nodes that were run last: each has R children, the candidates. Candidates are counted over
all levels; the root is -1. One launch each on a GPU (kernels/triton/tree.py), where torch needs twenty and fifty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.operands import Candidates, Frontier, Level, Nodes, Picked


def grow_level(
    frontier: Frontier,
    token: Tensor,
    value: Tensor,
    fixed: tuple[Tensor, Tensor] | None,
    width: int,
    *,
    first: int,
    ran: int,
) -> Level:
    """Grow a level from the nodes of `frontier`, whose children have these tokens and log-probabilities `[B, M, R]`.

    M may be 1 in both where all nodes have the same children. `fixed`: scores `[C]` and picked candidates `[M']` of a
    tree that is given as data; else the `width` best by cumulative log-probability are picked, the earlier of equals.
    `first`: candidates of earlier levels; `ran`: nodes that were run before, the root excluded.
    """
    batch, nodes = frontier.index.shape
    fan_out = token.shape[2]
    width = min(width, nodes * fan_out) if fixed is None else len(fixed[1])
    if uses_triton(token.device):
        from kernels.triton import tree as gpu

        return gpu.grow_level(frontier, token, value, fixed, width, first=first, ran=ran)
    tokens = token.expand(batch, nodes, fan_out).flatten(1)
    cumulative = (frontier.log_prob[..., None] + value).flatten(1)
    if fixed is None:
        order = cumulative.sort(dim=1, descending=True, stable=True).indices if width else tokens
        scores, picked = cumulative, order[:, :width]
    else:
        scores, picked = (part.expand(batch, -1) for part in fixed)
    parent = picked // fan_out
    bits = torch.ones((), dtype=torch.int64, device=token.device) << ran + torch.arange(width, device=token.device)
    following = Frontier(cumulative.gather(1, picked), first + picked, frontier.tree_mask.gather(1, parent) | bits)
    parents = frontier.index.repeat_interleave(fan_out, dim=1)
    return Level(tokens, parents, scores, Picked(parent, tokens.gather(1, picked), following))


def best_nodes(roots: Tensor, candidates: Candidates, nodes: Tensor, depth: Tensor, width: int, deepest: int) -> Nodes:
    """Return the trees of the best candidates, best first, the earlier of equals.

    A tree has the root `roots[b]` and at most `nodes[b]` <= `width` < 64 candidates, none deeper than `depth[b]`; those
    of score -inf are left out. No level is below `deepest`. No candidate may score higher than its parent or precede
    it, so parents come first. Entries past
    a tree's length are children of the root with token 0. The host does not wait for the device.
    """
    width = min(width, candidates.token.shape[1])
    if uses_triton(roots.device):
        from kernels.triton import tree as gpu

        return gpu.best_nodes(roots, candidates, nodes, depth, width)
    token, parent, level, score = candidates
    best = score.masked_fill(level > depth[:, None], -torch.inf).sort(dim=1, descending=True, stable=True)
    values, chosen = best.values[:, :width], best.indices[:, :width]
    rank = torch.arange(width, device=token.device)
    inside = (rank < nodes[:, None]) & (values > -torch.inf)
    node_of = torch.zeros_like(parent).scatter_(1, chosen, (rank + 1).expand_as(chosen))
    above = parent.gather(1, chosen)
    above = torch.where(inside & (above >= 0), node_of.gather(1, above.clamp(min=0)), 0)
    root, token = roots[:, None], torch.where(inside, token.gather(1, chosen), 0)
    token, above = torch.cat([root, token], dim=1), torch.cat([torch.full_like(root, -1), above], dim=1)
    return Nodes(token, above.int(), *depths_and_masks(above.clamp(min=0), deepest), inside.sum(1) + 1)


def depths_and_masks(above: Tensor, deepest: int) -> tuple[Tensor, Tensor]:
    """Return depths (int32) and tree masks of nodes `[B, N]` from their parents, 0 for the root's own.

    `deepest` bounds the depth. By pointer doubling: each iteration reaches twice as far up.
    """
    node = torch.arange(above.shape[1], device=above.device)
    bit = torch.ones((), dtype=torch.int64, device=above.device) << node  # bit 63 is the sign bit
    masks, depth, reach = bit.expand_as(above), (node > 0).int().expand_as(above), above
    for _ in range(deepest.bit_length()):
        depth = depth + depth.gather(1, reach)
        masks = masks | masks.gather(1, reach)
        reach = reach.gather(1, reach)
    return depth, masks | 1
