"""Verification of a draft tree: finds the path of drafted tokens that equals the target's choices, without a tree walk.

ok[0] = true, ok[i] = token[i] == choice[parent[i]]; a node is accepted if it and all its ancestors are ok; the deepest
accepted node ends the accepted path. Siblings have distinct tokens, so that node is unique.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.library import library
from kernels.dispatch import address, uses_triton
from kernels.operands import Nodes

NATIVE = [torch.int64, torch.int32, torch.int32, torch.int64, torch.int64, torch.int64]  # dtypes of the C kernel


class Accepted(NamedTuple):
    """The outcome of a verify. Of each row of W entries the first `depth[b]` + 1 count; the others are 0."""

    token: Tensor  # [B, W] the accepted tokens, then the bonus token
    path: Tensor  # [B, W] the accepted nodes, ascending, the root first
    depth: Tensor  # [B] number of accepted tokens
    moves: tuple[Tensor, Tensor] | None = None  # slots from and to which KV moves, [M] each; None if none does


def accepted_path(token: Tensor, ancestors: Tensor | None, last: Tensor, choice: Tensor, width: int) -> Accepted:
    """Return the paths to the nodes `last` `[B]` and their tokens; no path has more than `width` nodes.

    token, ancestors (None for chains) and the target's `choice` per node, `[B, N]` each.
    """
    node = torch.arange(token.shape[1], device=token.device)
    if ancestors is None:
        depth, path = last, node[:width].expand(len(token), width)
    else:
        inside = ancestors.gather(1, last[:, None]) >> node & 1
        depth = inside.sum(1) - 1
        path = torch.where(inside > 0, node, node + len(node)).sort(dim=1).indices[:, :width]
    kept, following = node[:width] <= depth[:, None], path.roll(-1, dims=1)
    path = torch.where(kept, path, 0)
    emitted = torch.where(node[:width] < depth[:, None], token.gather(1, following), choice.gather(1, path))
    return Accepted(torch.where(kept, emitted, 0), path, depth)


def accept(nodes: Nodes, choice: Tensor, typical_mask: Tensor | None = None) -> Tensor:
    """Return the index of the last accepted node of each request, `[B]` (0 if no drafted token was accepted).

    `choice` `[B, N]`: the target's, at every node. Nodes in `typical_mask` `[B, N]` bool are ok as well (typical
    acceptance); of equally long paths, the one that ends at the lowest node is taken.
    """
    device = choice.device
    if uses_triton(device):
        from kernels.triton import verify

        return verify.accept(*nodes, choice, typical_mask)
    native = library() if device.type == "cpu" else None
    if native is not None:  # replaces some twenty torch operations on a few numbers each
        fields = [x.contiguous() for x in (*nodes, choice)]
        assert [x.dtype for x in fields] == NATIVE
        typical = None if typical_mask is None else typical_mask.contiguous()
        last = torch.empty(len(choice), dtype=torch.int64)
        native.accept(*map(address, (*fields, typical, last)), *choice.shape)
        return last
    return accept_in_torch(nodes, choice, typical_mask)


def accept_in_torch(nodes: Nodes, choice: Tensor, typical_mask: Tensor | None = None) -> Tensor:
    """The same as `accept` in plain torch: the reference for the kernels."""
    token, parent, depth, ancestors, length = nodes
    index = torch.arange(token.shape[1], device=token.device)
    ok = token == choice.gather(1, parent.clamp(min=0).long())
    if typical_mask is not None:
        ok |= typical_mask
    ok[:, 0] = True
    ok &= index < length[:, None]
    ok_word = (ok.long() << index).sum(1)  # bit 63 makes the word negative, which does not affect the mask below
    alive = (ancestors & ~ok_word[:, None]) == 0
    alive &= index < length[:, None]
    return torch.where(alive, depth, -1).argmax(1)
