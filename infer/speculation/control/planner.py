"""Plans the draft budget of each request, step by step: as large as pays on this machine, or nothing at all.

A step emits one token per request plus, for every drafted node, its probability of being accepted
(acceptance_model.py); its cost is that of its drafts and its rows (cost_model.py). Depth and rows are chosen for the
whole batch to maximise tokens per second. The plan decides how many tokens a step emits, never which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from infer.speculation.budget import NOTHING, Budget, VerifiedDraft, candidate_budgets
from infer.speculation.control.acceptance_model import LATE, AcceptanceBucket, AcceptanceModel
from infer.speculation.control.baseline_probe import BaselineProbe
from infer.speculation.control.confidence import DRAFTER, Confidence, Prices
from infer.speculation.control.cost_model import CostModel
from infer.speculation.control.trials import TRIAL_SHARE, TRIAL_STEPS

MIN_GAIN = 0.04  # margin by which drafting for tracked requests must beat plain decoding
# What tracking (keeping features) adds to a step without drafts, as a share of a plain step of one request; hardly more
# for several requests.
TRACKING_COST = 0.05
# By how much the speedup of drafting for a whole batch is overestimated, per other request in it: perhaps only few of
# them are drafted for, while features of all are kept.
BATCH_PENALTY = 0.01
HYSTERESIS = 0.03  # margin by which a new plan must beat the one in force
PLAN_STEPS = 16  # steps that a plan stays in force while the batch hardly changes
UPDATE_S = 0.01  # seconds between steps that update the cost model: an update takes 1 % of the shortest steps
CACHE_S = 0.2  # seconds for which the cost of drafting for a whole batch is cached
ROUNDING = 1e-9  # tolerance in sums of probabilities
MIN_LEFT = 0.75  # share of the requests it was made for that must be left for a plan to stay in force
# Scoring chains for an early exit costs the host this many seconds per token, and saves about this share of a step.
SCORING_S, SCORING_SAVES = 100e-6, 0.05
PROBE_SHARE = 0.005  # share of the time without drafts that may go into probing whether they would pay again
# Steps of a probe of a request that its drafter does not track: its KV begins at the next page boundary, and the
# drafter must see some tokens before it drafts.
TRACKING_STEPS = 40


class Candidate(NamedTuple):
    """A request that could be drafted for."""

    request_id: str
    drafter: str
    allowed: Budget  # or a part of it: a chain's first nodes, a tree's best
    ready: bool = True  # its drafter can draft for it now; otherwise a budget starts the tracking
    bucket: AcceptanceBucket = LATE
    worth_tracking: bool = True  # if it is not ready: enough tokens are left to start tracking it, and that would pay
    context: int = 0  # its length in tokens


class Forecast(NamedTuple):
    """What a planner expects of the next steps, for display."""

    depth: int  # of the deepest drafts, 0 if nothing is drafted
    speedup: float  # over plain decoding, by the planner's estimates
    bias: float  # recently accepted tokens over expected ones; 1 is calibrated
    errors: tuple[float, float] | None = None  # of the probabilities (confidence.py), where chains may exit early


class Planner(Protocol):
    @property
    def forecast(self) -> Forecast | None:
        """The current forecast; None from a planner that makes none."""
        ...

    def needs_candidates(self, decoding: tuple[str, ...], load: int) -> bool:
        """Return whether the next call of `plan`, with the same arguments, needs to be told the candidates."""
        ...

    def plan(self, decoding: tuple[str, ...], load: int, candidates: Sequence[Candidate] | None) -> None:
        """Plan the next step of the `decoding` requests; their number will soon be `load`.

        `candidates`: those of them that may be drafted for, None unless `needs_candidates`.
        """
        ...

    def should_track(
        self, drafter: str, allowed: Budget, batch: int, ahead: Mapping[AcceptanceBucket, int], unread: int = 0
    ) -> bool:
        """Return whether tracking a request without history is worth its cost at this batch size.

        `ahead` is how many tokens it has yet to emit in each acceptance bucket, `unread` how many its drafter must read
        first.
        """
        ...

    def skips(self, request_id: str) -> bool:
        """Return whether the request's budget is NOTHING whatever is allowed; cheaper than `budget`."""
        ...

    def budget(self, request_id: str, allowed: Budget) -> Budget: ...

    def record_draft(self, request_id: str, drafter: str, bucket: AcceptanceBucket, draft: VerifiedDraft) -> None: ...

    def record_step(self, batch: int, rows: int, drafting: float | None, whole: float) -> None:
        """Record a step without prefill.

        `drafting`: its seconds in the proposers, None if they cannot be told from the rest; `whole`: in all.
        """
        ...

    def forget(self, request_id: str) -> None: ...


class AsAllowed:
    """Grants every request all that is allowed. Learns nothing."""

    @property
    def forecast(self) -> Forecast | None:
        return None

    def needs_candidates(self, decoding: tuple[str, ...], load: int) -> bool:
        return False

    def plan(self, decoding: tuple[str, ...], load: int, candidates: Sequence[Candidate] | None) -> None:
        pass

    def should_track(
        self, drafter: str, allowed: Budget, batch: int, ahead: Mapping[AcceptanceBucket, int], unread: int = 0
    ) -> bool:
        return True

    def skips(self, request_id: str) -> bool:
        return False

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        return allowed

    def record_draft(self, request_id: str, drafter: str, bucket: AcceptanceBucket, draft: VerifiedDraft) -> None:
        pass

    def record_step(self, batch: int, rows: int, drafting: float | None, whole: float) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class NoDrafts(AsAllowed):
    """Grants no drafts, though proposers are kept up to date."""

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        return NOTHING


@dataclass
class Probe:
    """A trial of drafting for one request, or of tracking it so that it can be drafted for, while no other is."""

    request_id: str
    budget: Budget
    steps: int  # that are left


@dataclass(frozen=True)
class Plan:
    budgets: Mapping[str, Budget]  # by request id; only those that are drafted for
    depth: int  # of the deepest budget
    speed: float  # expected tokens per second
    plain: float  # the same without drafts

    @property
    def speedup(self) -> float:
        return self.speed / self.plain if self.plain else 1.0


class Controller:
    """Plans by expected speed; a plan stays in force for a few steps, or until the batch changes much.

    With `confidence` a plan only decides which requests get chains; the length of each follows from the probabilities
    of its tokens.
    """

    def __init__(self, costs: CostModel, acceptance: AcceptanceModel, confidence: Confidence | None = None) -> None:
        self.costs, self.acceptance, self.confidence = costs, acceptance, confidence
        self.current = Plan({}, 0, 0.0, 0.0)
        self._decoding: tuple[str, ...] = ()
        self._candidates: Sequence[Candidate] = ()
        self._age = 0
        self._probe: Probe | None = None
        self._credit = 0.0  # seconds that may be spent on probes
        self._due: tuple[Candidate, float] | None = None  # request of the next probe, and its price in seconds
        self._turn = 0
        self._baseline = BaselineProbe(costs.knows_plain)
        self._quiet_s = 0.0  # seconds of plain steps since the last plan
        self._unlearnt_s = 0.0  # seconds of steps since the cost model was last updated
        # Arguments of `drafted_for` that yield the requests drafted for in the last step: of these the drafter has
        # little left to read.
        self._before: tuple[Sequence[Candidate], Mapping[str, Budget]] = (), {}
        # Seconds of a step in which a whole batch is drafted for alike, one per budget; cached for CACHE_S, since
        # they are needed for every new request.
        self._seconds: dict[tuple[str, Budget, int], list[float]] = {}
        self._cached_s = 0.0

    def needs_candidates(self, decoding: tuple[str, ...], load: int) -> bool:
        return self._outdated(decoding, load) or self._has_new(decoding)

    def plan(self, decoding: tuple[str, ...], load: int, candidates: Sequence[Candidate] | None) -> None:
        outdated = self._outdated(decoding, load)
        self._age += 1
        if self._cached_s >= CACHE_S:
            self._seconds.clear()
            self._cached_s = 0.0
        self._baseline.next_step(self.current.speedup)
        if outdated:
            assert candidates is not None
            self._decoding, self._candidates, self._age = decoding, candidates, 0
            if candidates:
                self.costs.set_context([candidate.context for candidate in candidates])
            if not self.current.budgets:  # corrections learnt at another load would go stale now
                self.costs.decay(self._quiet_s)
            self._quiet_s = 0.0
            planned = [] if self.costs.guessed else [one for one in candidates if one.ready or one.worth_tracking]
            batch, depth = len(decoding), self.current.depth
            self.current = best_plan(batch, planned, self.costs, self.acceptance, depth, self._start_margin(batch))
            if self.confidence is not None and self.current.budgets:
                self._enable_early_exit(self.confidence)
        elif self._has_new(decoding):
            assert candidates is not None
            self.current = with_new_requests(self.current, self._candidates, candidates)
            self._decoding, self._candidates = decoding, candidates
        self._probe = self._next_probe(decoding)
        if self.confidence is not None and not self.current.budgets:
            self.confidence.prices, self.confidence.scoring = None, True

    def _has_new(self, decoding: tuple[str, ...]) -> bool:
        """Return whether the plan in force drafts, and requests have joined that it does not cover."""
        return bool(self.current.budgets) and not set(decoding) <= set(self._decoding)

    def _outdated(self, decoding: tuple[str, ...], load: int) -> bool:
        """Return whether a new plan is due.

        It is if the plan is old, if too few of its requests are left and no others come in their place, or if too many
        requests have joined that it does not cover.
        """
        if self._age + 1 >= PLAN_STEPS:
            return True
        if decoding == self._decoding:
            return False
        before = len(self._decoding)
        if max(len(decoding), load) < MIN_LEFT * before:
            return True
        known = min(before, len(decoding))
        if self.current.budgets:
            known = len(set(decoding) & set(self._decoding))
        return known < MIN_LEFT * len(decoding)

    def should_track(
        self, drafter: str, allowed: Budget, batch: int, ahead: Mapping[AcceptanceBucket, int], unread: int = 0
    ) -> bool:
        plain, worth = self.costs.plain(batch) / batch, -self.costs.read(drafter, unread)
        keeping = TRACKING_COST * self.costs.plain(1) / self.costs.plain(batch)
        least = 1 + MIN_GAIN + self._start_margin(batch)
        for tokens, speedup in zip(ahead.values(), self._speedups(drafter, allowed, batch, ahead), strict=True):
            # The cost of plain steps was learnt with tracked requests.
            gain = speedup / (1 + keeping + BATCH_PENALTY * (batch - 1))
            worth += tokens * plain * (1 - 1 / gain if gain > least else -keeping)
        return worth > 0

    def _start_margin(self, batch: int) -> float:
        """Return the additional margin (hysteresis) by which drafting must beat plain decoding before it starts.

        Within the lifetime of a plan drafting must recover the cost of switching back to plain steps; otherwise
        alternating between the two would be slower than either.
        """
        if self.current.budgets or not batch:
            return 0.0
        return self._baseline.switch_s / (PLAN_STEPS * self.costs.plain(batch))

    def _speedups(
        self, drafter: str, allowed: Budget, batch: int, ahead: Mapping[AcceptanceBucket, int]
    ) -> list[float]:
        """Return the speedup over plain decoding for each bucket in `ahead`, at the best budget for the whole batch.

        All requests are assumed to be drafted for alike. The others are anywhere in their outputs, so they gain this
        request's average over all of `ahead`.
        """
        asked = drafter, allowed, batch
        if asked not in self._seconds:
            budgets = candidate_budgets(allowed)
            rows = batch * np.array([1.0 + budget.nodes for budget in budgets])
            drafting = np.array([self.costs.draft(drafter, batch, budget.depth) for budget in budgets])
            self._seconds[asked] = (self.costs.verify(batch, rows) + drafting).tolist()
        seconds, tokens = self._seconds[asked], ahead.values()
        # Accepted tokens by bucket and budget. For so few numbers lists are faster than arrays.
        sums = [self.acceptance.gains("", drafter, allowed, bucket) for bucket in ahead]
        others = [sum(map(mul, tokens, level)) / sum(tokens) for level in zip(*sums, strict=True)]
        plain = self.costs.plain(batch) / batch
        return [
            max((batch + n + (batch - 1) * m) / s for n, m, s in zip(own, others, seconds, strict=True)) * plain
            for own in sums
        ]

    def skips(self, request_id: str) -> bool:
        drafts = request_id in self.current.budgets or (self._probe and self._probe.request_id == request_id)
        return self._baseline.probing or not drafts

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        if self.skips(request_id):
            return NOTHING
        own = self.current.budgets.get(request_id, NOTHING)
        if self._probe is not None and self._probe.request_id == request_id:
            own = self._probe.budget
        return Budget(min(own.nodes, allowed.nodes), min(own.depth, allowed.depth))

    def record_draft(self, request_id: str, drafter: str, bucket: AcceptanceBucket, draft: VerifiedDraft) -> None:
        if draft.depth:
            accepted, expected = len(draft.path), None
            if self.confidence is not None:
                expected = self.confidence.update(request_id, draft.depth, accepted)
            if expected is None:
                expected = self.acceptance.expected(request_id, drafter, draft, bucket)
            self.acceptance.record(request_id, drafter, draft, expected, bucket)
            if self._probe is not None:  # accepted tokens earn time for further probes; more than expected, a new plan
                batch = len(self._decoding)
                self._credit += accepted * self.costs.plain(batch) / batch
                self._age = PLAN_STEPS if accepted > expected else self._age
                self._probe.steps = min(self._probe.steps, TRIAL_STEPS) if self.costs.guessed else 0

    def record_step(self, batch: int, rows: int, drafting: float | None, whole: float) -> None:
        self._unlearnt_s += whole
        self._cached_s += whole
        due = self._unlearnt_s >= UPDATE_S
        if due:
            self._unlearnt_s = 0.0
        if rows == batch:
            self._credit += (TRIAL_SHARE if self.costs.guessed else PROBE_SHARE) * whole
            self._quiet_s += whole
            settled = self._baseline.plain(whole, self.costs.plain(batch))
            if settled and (self._baseline.probing or due):
                self.costs.learn(batch=batch, rows=rows, seconds=whole - (drafting or 0.0))
            self._before = (), {}
            return
        self._baseline.drafted(whole)
        if on_trial := self._on_trial():
            budgets, due = {own.request_id: own.allowed for own in on_trial}, True
            before, self._before = self._before, (on_trial, budgets)
        else:
            budgets = self.current.budgets
            before, self._before = self._before, (self._candidates, budgets)
        if not due:
            return
        deep = drafted_for(*self._before)
        drafters = {own.drafter for own in deep}
        if drafting is None:
            if len(drafters) == 1:  # drafting is assumed to take the predicted share of the step
                drafts = self.costs.draft(deep[0].drafter, batch, self.current.depth)
                verify = float(self.costs.verify(batch, float(rows)))
                self.costs.learn(batch=batch, rows=rows, seconds=whole * verify / (verify + drafts))
                self.costs.tried()
            return
        slow = self.costs.learn(batch=batch, rows=rows, seconds=whole - drafting)
        known = {own.request_id for own in drafted_for(*before)}
        if len(drafters) == 1 and {own.request_id for own in deep} <= known:  # else drafters may have read prompts too
            if self.confidence is not None and self.confidence.scoring and deep[0].drafter == DRAFTER:
                counts = self.confidence.counts
            else:
                depths = [budgets[own.request_id].depth for own in deep]
                counts = [sum(depth > level for depth in depths) for level in range(max(depths))]
            # What slows the verify of a step slows its drafts as well, so it says nothing of drafting: divide it out.
            self.costs.learn_draft(deep[0].drafter, counts, drafting / slow)
            self.costs.tried()

    def _on_trial(self) -> list[Candidate]:
        """Return the one request that is drafted for to learn what drafting costs; empty if there is none."""
        if self._probe is None or not self.costs.guessed:
            return []
        name = self._probe.request_id
        return [own._replace(ready=True) for own in self._candidates if own.request_id == name]

    def forget(self, request_id: str) -> None:
        self.acceptance.forget(request_id)
        if self.confidence is not None:
            self.confidence.forget(request_id)

    @property
    def forecast(self) -> Forecast | None:
        plan = self.current
        errors = self.confidence.errors if self.confidence is not None else None
        return Forecast(plan.depth if plan.budgets else 0, plan.speedup, self.acceptance.bias, errors)

    def _enable_early_exit(self, confidence: Confidence) -> None:
        """Leave the length of planned chains to early exit: raise their budgets to all that is allowed.

        Also sets the prices of a row and of a level. If scoring costs more than it saves, it is turned off instead.
        """
        batch, planned = len(self._decoding), self.current
        scored = {own.request_id: own.allowed for own in self._candidates if own.drafter == DRAFTER}
        chains = [budget.depth for name, budget in planned.budgets.items() if name in scored]
        seconds = self.costs.verify(batch, float(batch + sum(chains))) + self.costs.draft(
            DRAFTER, len(chains), max(chains, default=0)
        )
        confidence.scoring = sum(chains) * SCORING_S < SCORING_SAVES * seconds
        if not confidence.scoring:
            confidence.prices = None
            return
        budgets = {name: scored.get(name, budget) for name, budget in planned.budgets.items()}
        rows = batch + sum(budget.nodes for budget in planned.budgets.values())
        row = (self.costs.verify(batch, 2.0 * rows) - self.costs.verify(batch, float(rows))) / rows
        one, all_ = (self.costs.draft(DRAFTER, n, 2) - self.costs.draft(DRAFTER, n, 1) for n in (1, batch))
        step = max(0.0, all_ - one) / max(1, batch - 1)
        confidence.prices = Prices(*(planned.speed * max(0.0, cost) for cost in (row, step, one - step)))
        self.current = replace(planned, budgets=budgets)

    def _next_probe(self, decoding: tuple[str, ...]) -> Probe | None:
        """Return a probe of one request, in rotation, once plain steps have earned its price."""
        if self.current.budgets or not self._candidates:
            return None
        going = self._probe
        if going is not None and going.steps > 1 and going.request_id in decoding:
            going.steps -= 1
            return going
        if self._age == 0 or self._due is None:
            self._due = self._price_probe(len(decoding))
        chosen, price = self._due
        self._credit = min(self._credit, 2 * price)
        if price > self._credit:
            return None
        self._turn, self._due = self._turn + 1, None
        if chosen.request_id not in decoding:  # it has ended since
            return None
        self._credit -= price
        steps = TRIAL_STEPS if self.costs.guessed else 1
        return Probe(chosen.request_id, chosen.allowed, steps if chosen.ready else TRACKING_STEPS + steps - 1)

    def _price_probe(self, batch: int) -> tuple[Candidate, float]:
        """Return the request whose turn it is, and the price of its probe in seconds."""
        ready = [own for own in self._candidates if own.ready] or self._candidates
        chosen, plain = ready[self._turn % len(ready)], self.costs.plain(batch)
        nodes, depth = chosen.allowed
        price = self.costs.verify(batch, float(batch + nodes)) - plain + self.costs.draft(chosen.drafter, 1, depth)
        price += self._baseline.switch_s
        return chosen, price if chosen.ready else price + TRACKING_STEPS * TRACKING_COST * self.costs.plain(1)


def drafted_for(candidates: Sequence[Candidate], budgets: Mapping[str, Budget]) -> list[Candidate]:
    return [own for own in candidates if own.ready and own.request_id in budgets]


def with_new_requests(plan: Plan, before: Sequence[Candidate], now: Sequence[Candidate]) -> Plan:
    """Return the plan with the requests that joined since: each gets the median budget of those like it.

    Requests are alike if they have the same drafter and both or neither are sampled.
    """
    budgets, known = dict(plan.budgets), {own.request_id for own in before}
    like: dict[tuple[str, bool], list[Budget]] = {}
    for own in before:
        like.setdefault((own.drafter, own.bucket.sampled), []).append(plan.budgets.get(own.request_id, NOTHING))
    for own in now:
        peers = like.get((own.drafter, own.bucket.sampled))
        if peers and own.request_id not in known and (own.ready or own.worth_tracking):
            budget = sorted(peers)[len(peers) // 2]
            if budget.nodes:
                budgets[own.request_id] = budget
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
    for depth, down_to, own, best in zip(depths, taken, speeds, speeds.argmax(1).tolist(), strict=True):
        if own[best] > plain:
            budgets: dict[str, Budget] = {}
            for index in np.flatnonzero(down_to[: best + 1]).tolist():
                piece = pieces[index]
                budgets[piece.request_id] = max(piece.budget, budgets.get(piece.request_id, NOTHING))
            plans[depth] = Plan(budgets, depth, float(own[best]), plain)
    chosen = max(plans.values(), key=lambda own: own.speed)
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
    for own in candidates:
        gains = acceptance.gains(own.request_id, own.drafter, own.allowed, own.bucket)
        mine, nodes, tokens = list[Piece](), 0, 0.0
        for budget, gain in zip(candidate_budgets(own.allowed), gains, strict=True):
            piece = Piece(own.request_id, own.drafter, budget.depth, budget.nodes - nodes, gain - tokens, budget)
            nodes, tokens = budget.nodes, gain
            while mine and piece.gain * mine[-1].rows > mine[-1].gain * piece.rows + ROUNDING:
                before = mine.pop()
                piece = piece._replace(rows=before.rows + piece.rows, gain=before.gain + piece.gain)
            mine.append(piece)
        pieces += mine
    return pieces
