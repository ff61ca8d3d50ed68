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

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.choose import ChoiceParameters, best_columns, choose_best
from kernels.cpu import walk as cpu
from kernels.triton import in_use


class Lattice(NamedTuple):
    """K candidates of each of the D slots of B blocks, ascending."""

    column: Tensor  # [B, D, K] draft ids
    token: Tensor  # [B, D, K] their target ids
    logit: Tensor  # [B, D, K] fp32, of the LM head


class Transition(NamedTuple):
    """What candidates are scored by after a token.

    With `predecessor` the query of a slot after token t is row t, times the slot's `factor` if there is one.
    """

    successor: Tensor  # [Vd, r] by draft id
    predecessor: Tensor | None = None  # [V, r] by target id
    factor: Tensor | None = None  # [B, D, r]

    def query(self, slot: int, before: Tensor) -> Tensor:
        """Return the queries `[B, M, r]` of a slot after the tokens `before` `[B, M]`."""
        assert self.predecessor is not None
        rows = F.embedding(before, self.predecessor)
        return rows if self.factor is None else rows * self.factor[:, slot, None]


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
    if in_use(lattice.logit.device):
        from kernels.triton import walk as gpu

        return gpu.walk
    return cpu.walk if cpu.supported(lattice, transition) else None


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
