"""Chooses what a batch drafts: the depth, and the rows down to it, that emit the most tokens per second.

Pure functions of the candidates, the cost model and the acceptance model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer.speculation.budget import NOTHING, Budget, candidate_budgets
from infer.speculation.control.acceptance_model import LATE, AcceptanceBucket, AcceptanceModel
from infer.speculation.control.cost_model import CostModel

MIN_GAIN = 0.04  # margin by which drafting for tracked requests must beat plain decoding
HYSTERESIS = 0.03  # margin by which a new plan must beat the one in force
ROUNDING = 1e-9  # tolerance in sums of probabilities


class Candidate(NamedTuple):
    """A request that could be drafted for."""

    request_id: str
    drafter: str
    allowed: Budget  # or a part of it: a chain's first nodes, a tree's best
    ready: bool = True  # its drafter can draft for it now; otherwise a budget starts the tracking
    bucket: AcceptanceBucket = LATE
    worth_tracking: bool = True  # if it is not ready: enough tokens are left to start tracking it, and that would pay
    context: int = 0  # its length in tokens


@dataclass(frozen=True)
class Plan:
    budgets: Mapping[str, Budget]  # by request id; only those that are drafted for
    depth: int  # of the deepest budget
    speed: float  # expected tokens per second
    plain: float  # the same without drafts

    @property
    def speedup(self) -> float:
        return self.speed / self.plain if self.plain else 1.0


def drafted_for(candidates: Sequence[Candidate], budgets: Mapping[str, Budget]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.ready and candidate.request_id in budgets]


def with_new_requests(plan: Plan, before: Sequence[Candidate], now: Sequence[Candidate]) -> Plan:
    """Return the plan with the requests that joined since: each gets the median budget of those like it.

    Requests are alike if they have the same drafter and both or neither are sampled.
    """
    budgets, earlier_ids = dict(plan.budgets), {candidate.request_id for candidate in before}
    peer_budgets: dict[tuple[str, bool], list[Budget]] = {}
    for candidate in before:
        peer_budgets.setdefault((candidate.drafter, candidate.bucket.sampled), []).append(
            plan.budgets.get(candidate.request_id, NOTHING)
        )
    for candidate in now:
        peers = peer_budgets.get((candidate.drafter, candidate.bucket.sampled))
        if peers and candidate.request_id not in earlier_ids and (candidate.ready or candidate.worth_tracking):
            budget = sorted(peers)[len(peers) // 2]
            if budget.nodes:
                budgets[candidate.request_id] = budget
    return replace(plan, budgets=budgets)


def best_plan(
    batch: int,
    candidates: Sequence[Candidate],
    costs: CostModel,
    acceptance: AcceptanceModel,
    depth_in_force: int,
    start_margin: float = 0.0,
) -> Plan:
    """Return the plan (a depth, and the rows down to it) with the most tokens per second.

    It is plain decoding unless a plan beats that by MIN_GAIN + `start_margin`. For every depth, nodes are taken in the
    order of their gain per row, chains from the root on and trees from their best node on, up to the number of highest
    expected speed. The depth in force stays unless another beats it by HYSTERESIS.
    """
    plain = batch / max(costs.plain(batch), 1e-9)
    plans = {0: Plan({}, 0, plain, plain)}
    pieces = sorted(split_into_pieces(candidates, acceptance), key=lambda piece: -piece.gain / piece.rows)
    if not pieces:
        return plans[0]
    depths = sorted({piece.level for piece in pieces})
    # [D, P] which pieces each depth admits, and the rows and tokens of the first, the first two, ... of them in sum
    taken = np.array([piece.level for piece in pieces]) <= np.array(depths)[:, None]
    rows = batch + (taken * np.array([float(piece.rows) for piece in pieces])).cumsum(1)
    tokens = batch + (taken * np.array([piece.gain for piece in pieces])).cumsum(1)
    seconds = costs.verify(batch, rows) + drafting_seconds(pieces, taken, costs, depths)
    speeds = np.where(taken, tokens / seconds, 0.0)
    for depth, admitted, entry, best in zip(depths, taken, speeds, speeds.argmax(1).tolist(), strict=True):
        if entry[best] > plain:
            budgets: dict[str, Budget] = {}
            for index in np.flatnonzero(admitted[: best + 1]).tolist():
                piece = pieces[index]
                budgets[piece.request_id] = max(piece.budget, budgets.get(piece.request_id, NOTHING))
            plans[depth] = Plan(budgets, depth, float(entry[best]), plain)
    chosen = max(plans.values(), key=lambda entry: entry.speed)
    in_force = plans.get(depth_in_force)
    if in_force is not None and chosen.speed < in_force.speed * (1 + HYSTERESIS):
        chosen = in_force
    return chosen if chosen.speed > plain * (1 + MIN_GAIN + start_margin) else plans[0]


def drafting_seconds(
    pieces: Sequence[Piece], taken: NDArray[np.bool_], costs: CostModel, depths: Sequence[int]
) -> NDArray[np.float64]:
    """Return the seconds `[D, P]` of drafting to each depth for all requests of the first, the first two, ... pieces.

    `taken` `[D, P]`: which pieces each depth admits. Between a drafter's first request and its last the cost is
    interpolated linearly in their number.
    """
    first = {piece.request_id: place for place, piece in reversed([*enumerate(pieces)])}
    seconds = np.zeros(taken.shape)
    for drafter in {piece.drafter for piece in pieces}:
        begun = np.zeros(len(pieces), dtype=np.int64)
        begun[[place for place in first.values() if pieces[place].drafter == drafter]] = 1
        count = (taken * begun).cumsum(1)
        last = np.maximum(count[:, -1:], 1)
        one = np.array([[costs.draft(drafter, 1, depth)] for depth in depths])
        all_ = np.array(
            [[costs.draft(drafter, n, depth)] for n, depth in zip(last[:, 0].tolist(), depths, strict=True)]
        )
        seconds += np.where(count > 0, one + (all_ - one) * (count - 1) / np.maximum(last - 1, 1), 0.0)
    return seconds


class Piece(NamedTuple):
    """Further nodes of a request's draft."""

    request_id: str
    drafter: str
    level: int  # of the deepest of them
    rows: int
    gain: float  # in expected tokens
    budget: Budget  # of the request, with these nodes


def split_into_pieces(candidates: Sequence[Candidate], acceptance: AcceptanceModel) -> list[Piece]:
    """Split what may be drafted into pieces: a chain node by node, a tree into groups of its next best nodes.

    Nodes that gain more per row than those before them are merged with these, without which they cannot be drafted.
    """
    pieces: list[Piece] = []
    for candidate in candidates:
        gains = acceptance.gains(candidate.request_id, candidate.drafter, candidate.allowed, candidate.bucket)
        merged, nodes, tokens = list[Piece](), 0, 0.0
        for budget, gain in zip(candidate_budgets(candidate.allowed), gains, strict=True):
            piece = Piece(
                candidate.request_id, candidate.drafter, budget.depth, budget.nodes - nodes, gain - tokens, budget
            )
            nodes, tokens = budget.nodes, gain
            while merged and piece.gain * merged[-1].rows > merged[-1].gain * piece.rows + ROUNDING:
                before = merged.pop()
                piece = piece._replace(rows=before.rows + piece.rows, gain=before.gain + piece.gain)
            merged.append(piece)
        pieces += merged
    return pieces
