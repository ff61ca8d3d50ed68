# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Draft trees in Triton: a program per request, which picks one candidate after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import Candidates, Frontier, Level, Nodes, Picked
from kernels.triton.device import empties

MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def best_remaining(keys, remaining, index, C: tl.constexpr):
    """Return the lowest index with the largest key among those remaining, C if there is none, and the key."""
    value = tl.max(tl.where(remaining, keys, MINUS_INFINITY), axis=0)
    return tl.min(tl.where(remaining & (keys == value), index, C), axis=0), value


@triton.jit
def element(values, index, at):
    """Return the element of `values` [C] at an index."""
    return tl.sum(tl.where(index == at, values, 0), axis=0)


@triton.jit(do_not_specialize=["nodes", "fan_out", "sources", "width", "first", "ran"])
def grow_kernel(
    log_probs, indices, masks, tokens, values, fixed_scores, fixed_picks, out_token, out_parent, out_score, parents,
    picked_tokens, out_log_probs, out_indices, out_masks, nodes, fan_out, sources, width, first, ran,
    FIXED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grow a level of `nodes` x `fan_out` candidates; `sources` is `nodes`, or 1 where all have the same children."""
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    count = nodes * fan_out
    inside, node = index < count, index // fan_out
    source = (row * sources + tl.minimum(node, sources - 1)) * fan_out + index % fan_out
    token = tl.load(tokens + source, mask=inside, other=0)
    before = tl.load(log_probs + row * nodes + node, mask=inside, other=0.0)
    cumulative = before + tl.load(values + source, mask=inside, other=0.0)
    score = cumulative
    if FIXED:
        score = tl.load(fixed_scores + index, mask=inside, other=0.0)
    tl.store(out_token + row * count + index, token, mask=inside)
    tl.store(out_parent + row * count + index, tl.load(indices + row * nodes + node, mask=inside, other=0), mask=inside)
    tl.store(out_score + row * count + index, score, mask=inside)
    remaining = inside
    for place in range(width):
        if FIXED:
            picked = tl.load(fixed_picks + place).to(tl.int32)
            log_prob = tl.sum(tl.where(index == picked, cumulative, 0.0), axis=0)
        else:
            picked, log_prob = best_remaining(cumulative, remaining, index, C)
            picked = tl.minimum(picked, count - 1)  # of numbers that are none, none is the best
            remaining = remaining & (index != picked)
        out, parent = row * width + place, picked // fan_out
        mask = tl.load(masks + row * nodes + parent) | (tl.full((), 1, tl.int64) << (ran + place).to(tl.int64))
        tl.store(parents + out, parent.to(tl.int64))
        tl.store(picked_tokens + out, element(token, index, picked))
        tl.store(out_log_probs + out, log_prob)
        tl.store(out_indices + out, (first + picked).to(tl.int64))
        tl.store(out_masks + out, mask)


@triton.jit(do_not_specialize=["count", "width"])
def best_kernel(
    roots, tokens, parents, scores, levels, nodes, depths, out_token, out_parent, out_depth, out_mask, out_length,
    count, width, C: tl.constexpr,
):  # fmt: skip
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    inside = index < count
    token = tl.load(tokens + row * count + index, mask=inside, other=0)
    parent = tl.load(parents + row * count + index, mask=inside, other=-1)
    score = tl.load(scores + row * count + index, mask=inside, other=MINUS_INFINITY)
    level = tl.load(levels + index, mask=inside, other=0)
    remaining = inside & (level <= tl.load(depths + row)) & (score > MINUS_INFINITY)
    number, mask = tl.zeros([C], tl.int32), tl.zeros([C], tl.int64)  # of candidates that were chosen
    most, length, out = tl.load(nodes + row), tl.full((), 1, tl.int64), row * (1 + width)
    tl.store(out_token + out, tl.load(roots + row))
    tl.store(out_parent + out, -1)
    tl.store(out_depth + out, 0)
    tl.store(out_mask + out, tl.full((), 1, tl.int64))
    for place in range(1, width + 1):
        chosen, _ = best_remaining(score, remaining, index, C)
        valid = (chosen < C) & (place <= most)
        above = element(parent, index, chosen)
        under_root = (above < 0) | (valid == 0)
        bit = tl.full((), 1, tl.int64) << place
        path = tl.where(under_root, 1, element(mask, index, above)) | bit
        tl.store(out_token + out + place, tl.where(valid, element(token, index, chosen), 0))
        tl.store(out_parent + out + place, tl.where(under_root, 0, element(number, index, above)))
        tl.store(out_depth + out + place, tl.where(valid, element(level, index, chosen), 1).to(tl.int32))
        tl.store(out_mask + out + place, path)
        taken = (index == chosen) & valid
        number, mask, remaining = tl.where(taken, place, number), tl.where(taken, path, mask), remaining & (taken == 0)
        length += valid.to(tl.int64)
    tl.store(out_length + row, length)


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
    """As kernels.tree.grow_level."""
    (batch, nodes), (_, sources, fan_out), device = frontier.index.shape, token.shape, token.device
    count = nodes * fan_out
    tokens, parents = empties(2, (batch, count), torch.int64, device)
    scores = torch.empty(batch, count, device=device)
    parent, picked, index, mask = empties(4, (batch, width), torch.int64, device)
    following = Frontier(torch.empty(batch, width, device=device), index, mask)
    fixed_scores, fixed_picks = (scores, index) if fixed is None else fixed
    block = triton.next_power_of_2(count)
    grow_kernel[batch,](
        *(part.contiguous() for part in frontier), token.contiguous(), value.contiguous(), fixed_scores, fixed_picks,
        tokens, parents, scores, parent, picked, *following, nodes, fan_out, sources, width, first, ran,
        FIXED=fixed is not None, C=block, num_warps=_warps(block),
    )  # fmt: skip
    return Level(tokens, parents, scores, Picked(parent, picked, following))


def best_nodes(roots: Tensor, candidates: Candidates, nodes: Tensor, depth: Tensor, width: int) -> Nodes:
    """As kernels.tree.best_nodes."""
    tokens, parents, level, scores = candidates
    batch, count = tokens.shape
    token, ancestors = empties(2, (batch, 1 + width), torch.int64, roots.device)
    parent, depths = empties(2, (batch, 1 + width), torch.int32, roots.device)
    length, block = torch.empty_like(roots), triton.next_power_of_2(count)
    fields = tokens.contiguous(), parents.contiguous(), scores.contiguous(), level
    best_kernel[batch,](
        roots, *fields, nodes, depth, token, parent, depths, ancestors, length, count, width,
        C=block, num_warps=_warps(block),
    )  # fmt: skip
    return Nodes(token, parent, depths, ancestors, length)


def _warps(block: int) -> int:
    return max(1, min(8, block // 128))
