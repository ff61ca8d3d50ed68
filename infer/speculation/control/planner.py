"""How far each request is drafted for, step by step: as far as it pays on this machine, down to not at all.

Emitted per step is one token a request and, of every drafted node, the chance that it survives (acceptance_model.py); a
step costs what its drafts and its rows cost (cost_model.py). Depth and rows are chosen for the whole batch so that
tokens per second are most. What is drafted decides how many tokens a step emits, never which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from infer.speculation.budget import NOTHING, Budget, Verified, cuts
from infer.speculation.control.acceptance_model import LATE, Kind, Survival
from infer.speculation.control.baseline_probe import Settling
from infer.speculation.control.confidence import DRAFTER, Confidence, Prices
from infer.speculation.control.cost_model import Costs
from infer.speculation.control.trials import TRIAL_SHARE, TRIAL_STEPS

CLEARLY = 0.04  # by which drafting for those that are followed must beat plain decoding
# Following costs, in a step without drafts, such a share of a plain step of one request, hardly more for several of
# them: features are kept.
KEEPING = 0.05
# By which drafting for a whole batch is overrated, for each other request in it: few of them may be drafted for, and
# features of all are kept.
TOGETHER = 0.01
STAYS = 0.03  # by which a new plan must beat the one in force
KEPT_STEPS = 16  # a plan stands that long while the batch stays about as it is
LEARN_S = 0.01  # seconds between steps that teach what steps cost: learning takes a hundredth of the shortest ones
REMEMBERED_S = 0.2  # seconds that what drafting for a whole batch would cost is not asked for again
ROUNDING = 1e-9  # of sums of chances
LEFT = 0.75  # of the requests it was made for, as many must be left
# Judging chains costs the host so many seconds a token, and brings about such a share of a step.
JUDGING_S, JUDGING_BRINGS = 100e-6, 0.05
PROBE_SHARE = 0.005  # of the time without drafts, spent on finding out whether they would pay again
# A probe of a request that its drafter does not follow begins with the next page, and some tokens must be seen, so it
# takes some steps.
WAKING_STEPS = 40


class Candidate(NamedTuple):
    """A request that could be drafted for."""

    request_id: str
    drafter: str
    allowed: Budget  # and less of it: a chain's first nodes, a tree's best
    ready: bool = True  # its drafter has followed it; else a budget makes it begin to
    kind: Kind = LATE
    wakes: bool = True  # if it is not ready: enough of it is left to make it so, and that would pay
    context: int = 0  # its tokens


class Forecast(NamedTuple):
    """What a planner expects of the next steps, for people to see."""

    depth: int  # of the deepest drafts, 0 where nobody drafts
    speedup: float  # over plain decoding, by its own figures
    bias: float  # accepted tokens over those expected, lately; 1 is right
    errors: tuple[float, float] | None = None  # of the chances (confidence.py), where drafts are judged


class Planner(Protocol):
    @property
    def forecast(self) -> Forecast | None:
        """None from one that expects nothing."""
        ...

    def plan(self, decoding: tuple[str, ...], load: int, ask: Callable[[], Sequence[Candidate]]) -> None:
        """For the next step of these requests, which will soon be `load`. `ask` says who of them may be drafted for."""
        ...

    def outlook(self, drafter: str, allowed: Budget, batch: int, ahead: Mapping[Kind, int], unread: int = 0) -> bool:
        """Whether to follow a request, of which nothing particular is known, would pay in a batch of so many: `ahead`
        is how many tokens of each kind it has yet to emit, `unread` how many its drafter must read first.
        """
        ...

    def passes_over(self, request_id: str) -> bool:
        """Whether its budget is nothing, whatever is allowed: cheaper to ask."""
        ...

    def budget(self, request_id: str, allowed: Budget) -> Budget: ...

    def drafted(self, request_id: str, drafter: str, kind: Kind, draft: Verified) -> None: ...

    def stepped(self, batch: int, rows: int, drafting: float | None, whole: float) -> None:
        """A step without prefill: seconds in the proposers, None if nobody can tell them from the rest, and in all."""
        ...

    def forget(self, request_id: str) -> None: ...


class AsAllowed:
    """Everyone drafts as far as it may. Learns nothing."""

    @property
    def forecast(self) -> Forecast | None:
        return None

    def plan(self, decoding: tuple[str, ...], load: int, ask: Callable[[], Sequence[Candidate]]) -> None:
        pass

    def outlook(self, drafter: str, allowed: Budget, batch: int, ahead: Mapping[Kind, int], unread: int = 0) -> bool:
        return True

    def passes_over(self, request_id: str) -> bool:
        return False

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        return allowed

    def drafted(self, request_id: str, drafter: str, kind: Kind, draft: Verified) -> None:
        pass

    def stepped(self, batch: int, rows: int, drafting: float | None, whole: float) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class Never(AsAllowed):
    """Nobody drafts, though proposers are kept up to date."""

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        return NOTHING


@dataclass
class Probe:
    """One request is drafted for, or its drafter woken so that it can be, while nobody else is."""

    request_id: str
    budget: Budget
    steps: int  # that it may still take


@dataclass(frozen=True)
class Plan:
    budgets: Mapping[str, Budget]  # of those that are drafted for
    depth: int  # of the deepest of them
    speed: float  # expected tokens per second
    plain: float  # the same without drafts

    @property
    def speedup(self) -> float:
        return self.speed / self.plain if self.plain else 1.0


class Controller:
    """Plans stand for a few steps, or until the batch changes much. With `confidence` they say for whom chains are
    drafted, and each is as long as its tokens' chances make it.
    """

    def __init__(self, costs: Costs, survival: Survival, confidence: Confidence | None = None) -> None:
        self.costs, self.survival, self.confidence = costs, survival, confidence
        self.current = Plan({}, 0, 0.0, 0.0)
        self._decoding: tuple[str, ...] = ()
        self._candidates: Sequence[Candidate] = ()
        self._age = 0
        self._probe: Probe | None = None
        self._credit = 0.0  # seconds that may be spent on probes
        self._due: tuple[Candidate, float] | None = None  # the next one, and its price
        self._turn = 0
        self._settling = Settling(costs.knows_plain)
        self._quiet_s = 0.0  # seconds of plain steps since the last plan
        self._unlearnt = 0.0  # seconds since a step taught what steps cost
        # Who was drafted for in the last step, so that little of them waits to be read: see `drafted_for`.
        self._before: tuple[Sequence[Candidate], Mapping[str, Budget]] = (), {}
        # Of a batch drafted for alike, by its budgets; for REMEMBERED_S, since every request that comes asks.
        self._seconds: dict[tuple[str, Budget, int], list[float]] = {}
        self._remembered_s = 0.0

    def plan(self, decoding: tuple[str, ...], load: int, ask: Callable[[], Sequence[Candidate]]) -> None:
        self._age += 1
        if self._remembered_s >= REMEMBERED_S:
            self._seconds.clear()
            self._remembered_s = 0.0
        self._settling.next_step(self.current.speedup)
        if self._outdated(decoding, load):
            self._decoding, self._candidates, self._age = decoding, ask(), 0
            if self._candidates:
                self.costs.set_context([own.context for own in self._candidates])
            if not self.current.budgets:  # what drafts taught was of another load, and nothing would put it right
                self.costs.fade(self._quiet_s)
            self._quiet_s = 0.0
            planned = [] if self.costs.guessed else [own for own in self._candidates if own.ready or own.wakes]
            batch, depth = len(decoding), self.current.depth
            self.current = best_plan(batch, planned, self.costs, self.survival, depth, self._beginning(batch))
            if self.confidence is not None and self.current.budgets:
                self._leave_to(self.confidence)
        elif self.current.budgets and not set(decoding) <= set(self._decoding):
            self.current = joined(self.current, self._candidates, candidates := ask())
            self._decoding, self._candidates = decoding, candidates
        self._probe = self._next_probe(decoding)
        if self.confidence is not None and not self.current.budgets:
            self.confidence.prices, self.confidence.judging = None, True

    def _outdated(self, decoding: tuple[str, ...], load: int) -> bool:
        """By its age; because too few are left of those that it was made for, and nobody comes in their place; or
        because too many have come whom it does not know.
        """
        if self._age >= KEPT_STEPS:
            return True
        if decoding == self._decoding:
            return False
        before = len(self._decoding)
        if max(len(decoding), load) < LEFT * before:
            return True
        known = min(before, len(decoding))
        if self.current.budgets:
            known = len(set(decoding) & set(self._decoding))
        return known < LEFT * len(decoding)

    def outlook(self, drafter: str, allowed: Budget, batch: int, ahead: Mapping[Kind, int], unread: int = 0) -> bool:
        plain, worth = self.costs.plain(batch) / batch, -self.costs.read(drafter, unread)
        keeping = KEEPING * self.costs.plain(1) / self.costs.plain(batch)
        least = 1 + CLEARLY + self._beginning(batch)
        for tokens, speedup in zip(ahead.values(), self._speedups(drafter, allowed, batch, ahead), strict=True):
            # What plain steps cost was learnt from followed requests.
            gain = speedup / (1 + keeping + TOGETHER * (batch - 1))
            worth += tokens * plain * (1 - 1 / gain if gain > least else -keeping)
        return worth > 0

    def _beginning(self, batch: int) -> float:
        """By how much more drafting must beat plain decoding where nobody drafts yet: in the steps that a plan stands
        it must gain what is lost in changing back, or who begins and ends in turns is slower than either.
        """
        if self.current.budgets or not batch:
            return 0.0
        return self._settling.change_s / (KEPT_STEPS * self.costs.plain(batch))

    def _speedups(self, drafter: str, allowed: Budget, batch: int, ahead: Mapping[Kind, int]) -> list[float]:
        """Over plain decoding, by the kind of what is ahead of a request, at the best size, were all of a batch
        drafted for alike. The others are as this one is at any time: anywhere in their texts.
        """
        asked = drafter, allowed, batch
        if asked not in self._seconds:
            budgets = cuts(allowed)
            rows = batch * np.array([1.0 + budget.nodes for budget in budgets])
            drafting = np.array([self.costs.draft(drafter, batch, budget.depth) for budget in budgets])
            self._seconds[asked] = (self.costs.verify(batch, rows) + drafting).tolist()
        seconds, tokens = self._seconds[asked], ahead.values()
        # By kind and budget, tokens that are accepted. So few numbers are faster without arrays.
        sums = [self.survival.gains("", drafter, allowed, kind) for kind in ahead]
        others = [sum(map(mul, tokens, level)) / sum(tokens) for level in zip(*sums, strict=True)]
        plain = self.costs.plain(batch) / batch
        return [
            max((batch + n + (batch - 1) * m) / s for n, m, s in zip(own, others, seconds, strict=True)) * plain
            for own in sums
        ]

    def passes_over(self, request_id: str) -> bool:
        drafts = request_id in self.current.budgets or (self._probe and self._probe.request_id == request_id)
        return self._settling.reminds or not drafts

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        if self.passes_over(request_id):
            return NOTHING
        own = self.current.budgets.get(request_id, NOTHING)
        if self._probe is not None and self._probe.request_id == request_id:
            own = self._probe.budget
        return Budget(min(own.nodes, allowed.nodes), min(own.depth, allowed.depth))

    def drafted(self, request_id: str, drafter: str, kind: Kind, draft: Verified) -> None:
        if draft.depth:
            accepted, expected = len(draft.path), None
            if self.confidence is not None:
                expected = self.confidence.settle(request_id, draft.depth, accepted)
            if expected is None:
                expected = self.survival.expected(request_id, drafter, draft, kind)
            self.survival.record(request_id, drafter, draft, expected, kind)
            if self._probe is not None:  # what it brought pays for others, and a good surprise for a new plan
                batch = len(self._decoding)
                self._credit += accepted * self.costs.plain(batch) / batch
                self._age = KEPT_STEPS if accepted > expected else self._age
                self._probe.steps = min(self._probe.steps, TRIAL_STEPS) if self.costs.guessed else 0

    def stepped(self, batch: int, rows: int, drafting: float | None, whole: float) -> None:
        self._unlearnt += whole
        self._remembered_s += whole
        due = self._unlearnt >= LEARN_S
        if due:
            self._unlearnt = 0.0
        if rows == batch:
            self._credit += (TRIAL_SHARE if self.costs.guessed else PROBE_SHARE) * whole
            self._quiet_s += whole
            settled = self._settling.plain(whole, self.costs.plain(batch))
            if settled and (self._settling.reminds or due):
                self.costs.learn(batch=batch, rows=rows, seconds=whole - (drafting or 0.0))
            self._before = (), {}
            return
        self._settling.drafted(whole)
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
            if len(drafters) == 1:  # it is taken for as large a part as was expected
                drafts = self.costs.draft(deep[0].drafter, batch, self.current.depth)
                verify = float(self.costs.verify(batch, float(rows)))
                self.costs.learn(batch=batch, rows=rows, seconds=whole * verify / (verify + drafts))
                self.costs.tried()
            return
        slow = self.costs.learn(batch=batch, rows=rows, seconds=whole - drafting)
        known = {own.request_id for own in drafted_for(*before)}
        if len(drafters) == 1 and {own.request_id for own in deep} <= known:  # else prompts may have been read too
            if self.confidence is not None and self.confidence.judging and deep[0].drafter == DRAFTER:
                counts = self.confidence.counts
            else:
                depths = [budgets[own.request_id].depth for own in deep]
                counts = [sum(depth > level for depth in depths) for level in range(max(depths))]
            # What slows a step's verify slows its drafts, and is no news of them.
            self.costs.learn_draft(deep[0].drafter, counts, drafting / slow)
            self.costs.tried()

    def _on_trial(self) -> list[Candidate]:
        """Who is drafted for in order to learn what that costs: it alone."""
        if self._probe is None or not self.costs.guessed:
            return []
        name = self._probe.request_id
        return [own._replace(ready=True) for own in self._candidates if own.request_id == name]

    def forget(self, request_id: str) -> None:
        self.survival.forget(request_id)
        if self.confidence is not None:
            self.confidence.forget(request_id)

    @property
    def forecast(self) -> Forecast | None:
        plan = self.current
        errors = self.confidence.errors if self.confidence is not None else None
        return Forecast(plan.depth if plan.budgets else 0, plan.speedup, self.survival.bias, errors)

    def _leave_to(self, confidence: Confidence) -> None:
        """Opens the planned chains as far as they may go, at the prices of a row and of a level of drafts; if judging
        them is not dearer than what it brings.
        """
        batch, planned = len(self._decoding), self.current
        judged = {own.request_id: own.allowed for own in self._candidates if own.drafter == DRAFTER}
        chains = [budget.depth for name, budget in planned.budgets.items() if name in judged]
        seconds = self.costs.verify(batch, float(batch + sum(chains))) + self.costs.draft(
            DRAFTER, len(chains), max(chains, default=0)
        )
        confidence.judging = sum(chains) * JUDGING_S < JUDGING_BRINGS * seconds
        if not confidence.judging:
            confidence.prices = None
            return
        budgets = {name: judged.get(name, budget) for name, budget in planned.budgets.items()}
        rows = batch + sum(budget.nodes for budget in planned.budgets.values())
        row = (self.costs.verify(batch, 2.0 * rows) - self.costs.verify(batch, float(rows))) / rows
        one, all_ = (self.costs.draft(DRAFTER, n, 2) - self.costs.draft(DRAFTER, n, 1) for n in (1, batch))
        step = max(0.0, all_ - one) / max(1, batch - 1)
        confidence.prices = Prices(*(planned.speed * max(0.0, cost) for cost in (row, step, one - step)))
        self.current = replace(planned, budgets=budgets)

    def _next_probe(self, decoding: tuple[str, ...]) -> Probe | None:
        """For one request, in turn, as soon as the steps without drafts have paid for it."""
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
        return Probe(chosen.request_id, chosen.allowed, steps if chosen.ready else WAKING_STEPS + steps - 1)

    def _price_probe(self, batch: int) -> tuple[Candidate, float]:
        """Whose turn it is, and how many seconds drafting for it costs."""
        ready = [own for own in self._candidates if own.ready] or self._candidates
        chosen, plain = ready[self._turn % len(ready)], self.costs.plain(batch)
        nodes, depth = chosen.allowed
        price = self.costs.verify(batch, float(batch + nodes)) - plain + self.costs.draft(chosen.drafter, 1, depth)
        price += self._settling.change_s
        return chosen, price if chosen.ready else price + WAKING_STEPS * KEEPING * self.costs.plain(1)


def drafted_for(candidates: Sequence[Candidate], budgets: Mapping[str, Budget]) -> list[Candidate]:
    return [own for own in candidates if own.ready and own.request_id in budgets]


def joined(plan: Plan, before: Sequence[Candidate], now: Sequence[Candidate]) -> Plan:
    """Those who have come since are drafted for as most of the others are that are like them, until the next plan."""
    budgets, known = dict(plan.budgets), {own.request_id for own in before}
    like: dict[tuple[str, bool], list[Budget]] = {}
    for own in before:
        like.setdefault((own.drafter, own.kind.sampled), []).append(plan.budgets.get(own.request_id, NOTHING))
    for own in now:
        peers = like.get((own.drafter, own.kind.sampled))
        if peers and own.request_id not in known and (own.ready or own.wakes):
            budget = sorted(peers)[len(peers) // 2]
            if budget.nodes:
                budgets[own.request_id] = budget
    return replace(plan, budgets=budgets)


def best_plan(
    batch: int,
    candidates: Sequence[Candidate],
    costs: Costs,
    survival: Survival,
    depth_in_force: int,
    beginning: float = 0.0,
) -> Plan:
    """The depth, and the rows down to it, of most tokens per second; plain decoding unless a plan beats it clearly,
    and by `beginning` more.

    For every depth, nodes are taken in the order of their chances, chains from the root on and of trees the best, for
    as long as the expected speed grows. The depth in force stays unless another beats it clearly.
    """
    plain = batch / max(costs.plain(batch), 1e-9)
    plans = {0: Plan({}, 0, plain, plain)}
    pieces = sorted(divided(candidates, survival), key=lambda piece: -piece.gain / piece.rows)
    if not pieces:
        return plans[0]
    depths = sorted({piece.level for piece in pieces})
    # [D, P] the pieces that may be taken down to each depth, and what the first, the first two, ... of them come to
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
    if in_force is not None and chosen.speed < in_force.speed * (1 + STAYS):
        chosen = in_force
    return chosen if chosen.speed > plain * (1 + CLEARLY + beginning) else plans[0]


def drafting_seconds(
    pieces: Sequence[Piece], taken: NDArray[np.bool_], costs: Costs, depths: Sequence[int]
) -> NDArray[np.float64]:
    """`[D, P]`, for those `taken` `[D, P]` of the first, the first two, ... of the pieces: drafting to each of the
    depths for all requests that they are of.

    Between a drafter's first request and its last the cost grows evenly with their number.
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
    """More nodes for a request: what they bring, in expected tokens, and the request's budget with them."""

    request_id: str
    drafter: str
    level: int  # of the deepest of them
    rows: int
    gain: float
    budget: Budget


def divided(candidates: Sequence[Candidate], survival: Survival) -> list[Piece]:
    """What may be drafted: a chain node by node, of a tree its first nodes, some at a time. Those that bring more a row
    than those before them are one piece with them, for they are not to be had without.
    """
    pieces: list[Piece] = []
    for own in candidates:
        gains = survival.gains(own.request_id, own.drafter, own.allowed, own.kind)
        mine, nodes, tokens = list[Piece](), 0, 0.0
        for budget, gain in zip(cuts(own.allowed), gains, strict=True):
            piece = Piece(own.request_id, own.drafter, budget.depth, budget.nodes - nodes, gain - tokens, budget)
            nodes, tokens = budget.nodes, gain
            while mine and piece.gain * mine[-1].rows > mine[-1].gain * piece.rows + ROUNDING:
                before = mine.pop()
                piece = piece._replace(rows=before.rows + piece.rows, gain=before.gain + piece.gain)
            mine.append(piece)
        pieces += mine
    return pieces
