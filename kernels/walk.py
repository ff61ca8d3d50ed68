"""Walks over a lattice: tokens of a block drafted one after another, each from a few candidates of its slot.

The LM head of a block drafter gives the logits of all slots at once, whatever tokens come before. A corrector adds a
score to the logit of a candidate after a token: the product of the candidate's row of a table and a query that depends
on the token (the Markov heads of DSpark, arXiv 2607.05147; the candidate selector of DFlash2). The candidates of a slot
are those that the rule of kernels/choose.py, its noise included, ranks first before the correction, so a sampled draft
loses no token that the noise favours.

Scores are in fp32, and decide only what is drafted, so their sums need no fixed order. A chain, or a level of a tree,
is one call of C (kernels/cpu/walk.c) or one launch on a GPU (kernels/triton/walk.py). With top-k, top-p or min-p, which
apply to the corrected candidates, a slot is some ten operations of torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.choose import best_columns, choose_best
from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.dispatch import KINDS, LANES, address, uses_triton
from kernels.operands import ChoiceParameters, Lattice, Transition

WalkArguments = structure("walk_args")  # of walk.c


def make_lattice(
    logits: Tensor, parameters: ChoiceParameters | None, positions: Tensor, draft_ids: Tensor, count: int
) -> Lattice:
    """Return the `count` best candidates of each slot, from logits `[B, D, Vd]`; all if there are no more.

    parameters `[B]`; positions `[B]`: of the first slot's choice; draft_ids `[Vd]`: target ids of the draft vocabulary.
    """
    batch, slots, size = logits.shape
    rows = logits.flatten(0, 1)
    at = (positions[:, None] + torch.arange(slots, device=logits.device)).flatten()
    column = best_columns(rows, parameters and parameters.repeated(slots), at, draft_ids, min(count, size))
    fields = column, draft_ids[column], rows.gather(1, column).float()
    return Lattice(*(field.unflatten(0, (batch, slots)) for field in fields))


def walk_chain(
    lattice: Lattice, transition: Transition, before: Tensor, parameters: ChoiceParameters | None, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the tokens of a chain from the token `before` `[B]`, and their log-probabilities, `[B, D]` each.

    `transition` has a `predecessor`. parameters and positions as for `make_lattice`.
    """
    slots, fused = lattice.column.shape[1], fused_walk(lattice, transition, parameters)
    if fused is not None:
        tokens, values = fused(
            lattice, transition, before[:, None], None, parameters, positions, first=0, levels=slots, count=1
        )
        return tokens[:, 0, :, 0], values[:, 0, :, 0]
    drafted, scores = list[Tensor](), list[Tensor]()
    for slot in range(slots):
        query = transition.query(slot, (drafted[-1] if drafted else before)[:, None])
        token, value = rank_candidates(lattice, slot, transition, query, parameters, positions + slot, 1)
        drafted.append(token[:, 0, 0])
        scores.append(value[:, 0, 0])
    return torch.stack(drafted, dim=1), torch.stack(scores, dim=1)


def fused_walk(
    lattice: Lattice, transition: Transition, parameters: ChoiceParameters | None
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the function that walks in one call or launch; None where there is none, and where choices are limited."""
    if parameters is not None and parameters.restricts:
        return None
    if uses_triton(lattice.logit.device):
        from kernels.triton import walk as gpu

        return gpu.walk
    return walk_in_c if runs_in_c(lattice, transition) else None


def rank_candidates(
    lattice: Lattice,
    slot: int,
    transition: Transition,
    query: Tensor,
    parameters: ChoiceParameters | None,
    positions: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Return the `count` best candidates of a slot for each of M nodes with queries `[B, M, r]`.

    Target ids and log-probabilities among the candidates, `[B, M, count]` each, fewer if there are no more. positions
    `[B]`: of the slot's choice.
    """
    count, fused = min(count, lattice.column.shape[-1]), fused_walk(lattice, transition, parameters)
    if fused is not None and query.dtype is transition.successor.dtype:
        tokens, values = fused(
            lattice, transition, None, query, parameters, positions, first=slot, levels=1, count=count
        )
        return tokens[:, :, 0], values[:, :, 0]
    width = query.shape[1]
    rows = F.embedding(lattice.column[:, slot], transition.successor).float()
    logits = torch.baddbmm(lattice.logit[:, slot, None], query.float(), rows.transpose(1, 2)).flatten(0, 1)
    token_ids = lattice.token[:, slot].repeat_interleave(width, dim=0)
    at, parameters = positions.repeat_interleave(width), parameters and parameters.repeated(width)
    tokens, values = choose_best(logits, parameters, at, token_ids, count)
    return tokens.unflatten(0, (-1, width)), values.unflatten(0, (-1, width))


MOST_CANDIDATES = 64  # as in walk.c


def runs_in_c(lattice: Lattice, transition: Transition) -> bool:
    """Return whether walk.c supports these: whole vectors in one dtype on the CPU, and no more candidates."""
    table = transition.successor
    if library() is None or table.device.type != "cpu" or table.dtype not in KINDS or table.shape[1] % LANES:
        return False
    others = [part for part in (transition.predecessor, transition.factor) if part is not None]
    if any(part.dtype is not table.dtype for part in others):
        return False
    return lattice.logit.shape[-1] <= MOST_CANDIDATES


def walk_in_c(
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
    arguments = WalkArguments(
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
