# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Walks over a lattice: a whole chain, or a level of a tree, in one launch; one program per node."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import ChoiceParameters, Lattice, Transition
from kernels.triton.choose import divided
from kernels.triton.noise import gumbel_noise, row_key

MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["repeat", "width", "slots", "first", "levels"])
def walk_kernel(
    columns, ids, logits, successor, predecessor, factor, query, before, temperatures, seeds_low, seeds_high, positions,
    tokens, values, repeat, width, slots, first, levels, size, rank,
    K: tl.constexpr, R: tl.constexpr, M: tl.constexpr, SAMPLED: tl.constexpr, TABLE: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Rank the candidates of `levels` slots, each after the best one of the slot before.

    TABLE: queries are rows of `predecessor`, with FACTOR times the slot's; without it there is one level, of `query`.
    """
    node = tl.program_id(0).to(tl.int64)
    root, k, r = node // width, tl.arange(0, K), tl.arange(0, R)
    token = node * 0
    if TABLE:
        token = tl.load(before + node)
    for level in range(levels):
        slot = root * slots + first + level
        if TABLE:
            q = tl.load(predecessor + token * rank + r, mask=r < rank, other=0.0)
            if FACTOR:
                q = (q * tl.load(factor + slot * rank + r, mask=r < rank, other=0.0)).to(q.dtype)
        else:
            q = tl.load(query + node * rank + r, mask=r < rank, other=0.0)
        inside = k < size
        column = tl.load(columns + slot * size + k, mask=inside, other=0)
        token_ids = tl.load(ids + slot * size + k, mask=inside, other=0)
        both = inside[:, None] & (r < rank)[None, :]
        rows = tl.load(successor + column[:, None] * rank + r[None, :], mask=both, other=0.0).to(tl.float32)
        keys = tl.load(logits + slot * size + k, mask=inside, other=MINUS_INFINITY)
        keys += tl.sum(rows * q.to(tl.float32)[None, :], axis=1)
        if SAMPLED:
            owner = root // repeat
            temperature = tl.load(temperatures + owner)
            keys = divided(keys, temperature)
            key = row_key(tl.load(seeds_low + owner), tl.load(seeds_high + owner), tl.load(positions + root) + level)
            keys = tl.where(temperature > 0, keys + gumbel_noise(key, token_ids), keys)
            keys = tl.where(inside, keys, MINUS_INFINITY)
        peak = tl.max(keys, axis=0)
        log_mass = peak + tl.log(tl.sum(tl.exp(keys - peak), axis=0))
        out = (node * levels + level) * M
        value, place = float("inf"), -1
        for best in range(M):
            remaining = inside & ((keys < value) | ((keys == value) & (k > place)))
            value = tl.max(tl.where(remaining, keys, MINUS_INFINITY), axis=0)
            place = tl.min(tl.where(remaining & (keys == value), k, size - 1), axis=0)
            chosen = tl.load(ids + slot * size + place)
            tl.store(tokens + out + best, chosen)
            tl.store(values + out + best, value - log_mass)
            if best == 0:
                token = chosen


def walk(
    lattice: Lattice,
    transition: Transition,
    before: Tensor | None,
    query: Tensor | None,
    parameters: ChoiceParameters | None,
    positions: Tensor,
    *,
    first: int,
    levels: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    """As kernels.walk.walk_in_c."""
    nodes = before if query is None else query[..., 0]
    assert nodes is not None
    (roots, width), (_, slots, size), p = nodes.shape, lattice.column.shape, parameters
    table, rank = transition.predecessor if query is None else None, transition.successor.shape[1]
    tokens = torch.empty(roots, width, levels, count, dtype=torch.int64, device=nodes.device)
    values = torch.empty(tokens.shape, device=nodes.device)
    unused, factor = lattice.logit, transition.factor
    walk_kernel[roots * width,](
        *(part.contiguous() for part in lattice), transition.successor, unused if table is None else table,
        unused if factor is None else factor.contiguous(), unused if query is None else query.contiguous(),
        unused if before is None else before.contiguous(), unused if p is None else p.temperature,
        unused if p is None else p.seed_low, unused if p is None else p.seed_high, positions, tokens, values,
        1 if p is None else p.repeat, width, slots, first, levels, size, rank,
        K=triton.next_power_of_2(size), R=triton.next_power_of_2(rank), M=count, SAMPLED=p is not None,
        TABLE=table is not None, FACTOR=factor is not None and table is not None, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, values
