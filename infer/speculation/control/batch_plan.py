"""Chooses what a batch drafts: the depth, and the rows down to it, that emit the most tokens per second.

Pure functions of the candidates, the cost model and the acceptance model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from infer.batch.history import UNSEEN, History
from infer.batch.tree import NOTHING, Budget
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.cost_model import CostModel


class Candidate(NamedTuple):
    """A request that could be drafted for."""

    request_id: str
    drafter: str
    allowed: Budget  # or a part of it: a chain's first nodes, a tree's best
    sampled: bool = False
    warm_up: int = 0  # tokens that its drafter must see before it drafts; 0: it can draft now
    worth_tracking: bool = True  # if it cannot draft now: enough tokens are left for a start to pay
    history: History = UNSEEN

    @property
    def ready(self) -> bool:
        return not self.warm_up


class Plan(NamedTuple):
    budgets: Mapping[str, Budget]  # by request id; only those that are drafted for
    depth: int  # of the deepest budget
    speed: float  # expected tokens per second
    plain: float  # the same without drafts

    @property
    def speedup(self) -> float:
        return self.speed / self.plain if self.plain else 1.0


class Piece(NamedTuple):
    """Further nodes of a request's draft."""

    request_id: str
    drafter: str
    rows: int
    gain: float  # in expected tokens
    budget: Budget  # of the request, with these nodes


def best_plan(
    batch: int, candidates: Sequence[Candidate], costs: CostModel, acceptance: AcceptanceModel, margin: float
) -> Plan:
    """Return the plan (a depth, and the rows down to it) with the most tokens per second.

    It is plain decoding unless a plan beats that by `margin`. For every depth, nodes are taken in the order of their
    gain per row, chains from the root on and trees from their best node on, up to the number of highest expected speed.
    """
    seconds = costs.plain(batch)
    speed = batch / seconds if seconds else 0.0
    best, least = Plan({}, 0, speed, speed), speed * (1 + margin)
    pieces = sorted(split_into_pieces(candidates, acceptance), key=lambda piece: -piece.gain / piece.rows)
    if not seconds:
        return best
    verify = np.array([costs.verify(batch, batch + n) for n in range(sum(piece.rows for piece in pieces) + 1)])
    for depth in sorted({piece.budget.depth for piece in pieces}):
        taken = [piece for piece in pieces if piece.budget.depth <= depth]
        time = verify[np.cumsum([piece.rows for piece in taken])]
        for drafter in {piece.drafter for piece in taken}:
            requests, counts = set[str](), list[int]()  # that it drafts for, with one piece after another
            for piece in taken:
                requests |= {piece.request_id} if piece.drafter == drafter else set()
                counts.append(len(requests))
            time = time + np.array([costs.draft(drafter, n, depth) for n in range(len(requests) + 1)])[counts]
        speeds = (batch + np.cumsum([piece.gain for piece in taken])) / time
        last = int(speeds.argmax())
        if speeds[last] > max(best.speed, least):
            budgets: dict[str, Budget] = {}
            for piece in taken[: last + 1]:
                budgets[piece.request_id] = max(piece.budget, budgets.get(piece.request_id, NOTHING))
            best = Plan(budgets, depth, float(speeds[last]), speed)
    return best


def split_into_pieces(candidates: Sequence[Candidate], acceptance: AcceptanceModel) -> list[Piece]:
    """Split what may be drafted into pieces: a chain node by node, a tree into groups of its next best nodes.

    Nodes that gain more per row than those before them are merged with these, without which they cannot be drafted.
    """
    pieces: list[Piece] = []
    for candidate in candidates:
        name, drafter, allowed, sampled, *_ = candidate
        merged, nodes, tokens = list[Piece](), 0, 0.0
        for budget, gain in acceptance.gains(candidate.history, drafter, allowed, sampled).items():
            piece = Piece(name, drafter, budget.nodes - nodes, gain - tokens, budget)
            nodes, tokens = budget.nodes, gain
            while merged and piece.gain * merged[-1].rows > merged[-1].gain * piece.rows:
                before = merged.pop()
                piece = piece._replace(rows=before.rows + piece.rows, gain=before.gain + piece.gain)
            merged.append(piece)
        pieces += merged
    return pieces
