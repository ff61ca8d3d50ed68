"""Walks over a lattice in C (walk.c): a whole chain, or a level of a tree, in one call."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.choose import ChoiceParameters
from kernels.cpu.declarations import fields
from kernels.cpu.library import KINDS, LANES, address, library

if TYPE_CHECKING:
    from kernels.walk import Lattice, Transition

MOST_CANDIDATES = 64  # as in walk.c


class Arguments(ctypes.Structure):
    """walk_args of walk.c."""

    __slots__ = ()
    _fields_ = fields("walk_args")


def supported(lattice: Lattice, transition: Transition) -> bool:
    """Return whether walk.c supports these: whole vectors in one dtype on the CPU, and no more candidates."""
    table = transition.successor
    if library() is None or table.device.type != "cpu" or table.dtype not in KINDS or table.shape[1] % LANES:
        return False
    others = [part for part in (transition.predecessor, transition.factor) if part is not None]
    if any(part.dtype is not table.dtype for part in others):
        return False
    return lattice.logit.shape[-1] <= MOST_CANDIDATES


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
    """Rank the candidates of `levels` slots from slot `first` on, for each of M nodes of B requests.

    `before` `[B, M]`: the token before the first slot; then the best candidate of each slot is the next one's. Or
    `query` `[B, M, r]`, for one slot. positions `[B]`: of the first slot. Returns the best tokens and their
    log-probabilities, `[B, M, levels, count]`.
    """
    native, nodes = library(), before if query is None else query[..., 0]
    assert native is not None
    assert nodes is not None
    (roots, width), (_, slots, size) = nodes.shape, lattice.column.shape
    p = parameters and parameters.by_row()
    zeros = torch.zeros(roots, dtype=torch.int64)
    sampling = (torch.zeros(roots), zeros, zeros) if p is None else (p.temperature, p.seed_low, p.seed_high)
    tokens = torch.empty(roots, width, levels, count, dtype=torch.int64)
    keys, masses = torch.empty(tokens.shape), torch.empty(roots, width, levels)
    tensors = {
        "columns": lattice.column, "ids": lattice.token, "logits": lattice.logit, "successor": transition.successor,
        "predecessor": None if query is not None else transition.predecessor, "factor": transition.factor,
        "query": query, "before": before, "positions": positions,
        **dict(zip(("temperature", "low", "high"), sampling, strict=True)),
    }  # fmt: skip
    tensors = {name: value if value is None else value.contiguous() for name, value in tensors.items()}
    outputs = {"tokens": tokens, "keys": keys, "masses": masses}
    arguments = Arguments(
        **{name: address(value) for name, value in (tensors | outputs).items()},
        roots=roots,
        width=width,
        slots=slots,
        first=first,
        levels=levels,
        size=size,
        rank=transition.successor.shape[1],
        count=count,
        kind=KINDS[transition.successor.dtype],
    )
    native.walk(ctypes.addressof(arguments))
    return tokens, keys - keys[..., :1] - masses.log()[..., None]
