"""Plans the draft budget of each request, step by step: as large as pays on this machine, or nothing at all.

A step emits one token per request plus, for every drafted node, its probability of being accepted
(acceptance_model.py); its cost is that of its drafts and its rows (cost_model.py). Depth and rows are chosen for the
whole batch to maximise tokens per second (batch_plan.py). The plan decides how many tokens a step emits, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer.batch.history import UNSEEN, History
from infer.batch.tree import NOTHING, Budget, VerifiedDraft
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.batch_plan import Candidate, Plan, best_plan
from infer.speculation.control.confidence import Confidence, Prices
from infer.speculation.control.cost_model import SETTLES_S, CostModel

PLAN_STEPS = 16  # that a plan stays in force; twice as many adapt too late: 0.96 to 0.98 of the speed at T = 0
# Expected gain over plain decoding above which drafts go on. They begin above twice as much, since a change between the
# two costs caches and drafter state: with 4 % no cell of the sweeps was slower than plain.
GAIN = 0.02
# Share of the time that may go into probes of what is not in use. A tenth of what a sweep can tell from noise.
PROBE_SHARE = 0.005
# What tracking a request adds to a plain step, as a share of one of one request: 0.11 to 0.14 ms
# of 2.0 were measured at one and two requests (docs/log/2026-11.md, "What does a steady hour show of the controller?").
TRACKING_SHARE = 0.05
# Seconds of a step per scored token above which early exit saves more than scoring costs: it saves 5 % of a step, a
# score takes the host 0.1 ms.
SCORED_TOKEN_S = 2e-3


class Forecast(NamedTuple):
    """What a planner expects of the next steps, for display."""

    depth: int  # of the deepest drafts, 0 if nothing is drafted
    speedup: float  # over plain decoding, by the planner's estimates
    bias: float  # recently accepted tokens over expected ones; 1 is calibrated
    errors: tuple[float, float] | None = None  # of the probabilities (confidence.py), where chains may exit early


class Planner:
    """Grants every request all that is allowed and learns nothing: the planner where speculation is not adaptive."""

    @property
    def forecast(self) -> Forecast | None:
        """The current forecast; None from a planner that makes none."""
        return None

    def next_step(self, decoding: tuple[str, ...]) -> bool:
        """Take note that a step of the `decoding` requests begins; return whether its drafts must be planned anew."""
        return False

    def plan(self, decoding: tuple[str, ...], candidates: Sequence[Candidate]) -> None:
        """Plan the next steps of the `decoding` requests; `candidates`: those of them that may be drafted for."""

    def should_track(self, candidate: Candidate, batch: int, tokens: int, unread: int = 0) -> bool:
        """Return whether tracking a request without history is worth its cost at this batch size.

        `tokens` is how many it may yet emit with drafts, `unread` how many its drafter must read first.
        """
        return True

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        """Return the request's budget in the next step, within what is allowed."""
        return allowed

    def record_draft(self, history: History, drafter: str, sampled: bool, draft: VerifiedDraft) -> None:
        """Record the outcome of a request's draft in this step, which may be empty."""

    def record_step(self, batch: int, rows: int, drafting: float | None, seconds: float) -> None:
        """Record a step without prefill, after its drafts.

        `drafting`: its seconds in the proposers, None if they cannot be told from the rest; `seconds`: in all.
        """


class NoDrafts(Planner):
    """Grants no drafts, though proposers are kept up to date."""

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        return NOTHING


class Stretch:
    """Steps of one kind in a row, with drafts or plain. Says which of them the planner may judge by.

    A step of the other kind begins a new stretch. It settles after SETTLES_S, until when steps are slow; those before
    show only what is faster than expected. Drafts that were planned and ended before they settled make the planner
    impatient: the next stretch of drafts is judged from its first step on, or drafts that always end early, as those
    of short answers do, would never be judged. A stretch of drafts that settles makes it patient again.
    """

    def __init__(self) -> None:
        self.drafts, self.seconds = False, SETTLES_S  # as if plain steps had settled
        self._patient = True
        self._lasted = True  # whether the drafts that were planned last went on until they settled
        self.judged = True  # whether the last step was

    def add(self, drafts: bool, seconds: float, *, planned: bool) -> int | None:
        """Add a step, with drafts that were planned or by a probe. Return in how many steps the plan is to be reviewed.

        None if nothing calls for a review: a step after drafts have settled shows whether they do as promised.
        """
        first = drafts != self.drafts
        if first:
            self.drafts, self.seconds, self._patient = drafts, 0.0, self._lasted or not drafts
        settled = self.seconds >= SETTLES_S
        self.judged = settled or not self._patient
        self.seconds += seconds
        if not drafts:
            return None
        settles = self.seconds >= SETTLES_S and not settled
        self._lasted = self.seconds >= SETTLES_S or (self._lasted and not planned)
        return 2 if settles else 0 if first and not self._patient else None


@dataclass
class Probe:
    """A trial of what the plan in force does not do: drafting for one request, or plain steps for all."""

    candidate: Candidate | None  # None: of plain steps
    steps: int  # that it lasts at most


class Controller(Planner):
    """Plans by expected speed; a plan stays in force for a few steps, or until a request joins those drafted for.

    Probes find out whether another plan would pay. They earn their time: a small share of all steps, and the tokens
    that probes themselves gain. With `confidence` a plan only decides which requests get chains; the length of each
    follows from the probabilities of its tokens.
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceModel,
        confidence: Confidence | None = None,
        *,
        probe_share: float = PROBE_SHARE,
    ) -> None:
        self.costs, self.acceptance, self.confidence = costs, acceptance, confidence
        self._probe_share = probe_share
        self.current = Plan({}, 0, 0.0, 0.0)
        self._steps_left = 0  # until the plan in force is looked at again
        self._planned: frozenset[str] = frozenset()  # requests that decoded when it was made
        self._stretch = Stretch()
        self._probe: Probe | None = None
        self._credit_s, self._turn = 0.0, 0  # time earned for probes; whose turn is next
        self._depths: dict[str, list[int]] = {}  # by drafter, of the drafts in this step
        self._speedups: dict[tuple[str, Budget, bool, int], float] = {}  # expected by the plan in force's evidence

    # ---- the plan --------------------------------------------------------------------------------------------------

    def next_step(self, decoding: tuple[str, ...]) -> bool:
        self._steps_left -= 1
        self._depths.clear()
        if (probe := self._probe) is not None:
            probe.steps -= 1
            if probe.steps <= 0 or (probe.candidate is not None and probe.candidate.request_id not in decoding):
                self._probe = None
        joined = bool(self.current.budgets or not self._planned) and not self._planned.issuperset(decoding)
        return self._steps_left <= 0 or joined

    def plan(self, decoding: tuple[str, ...], candidates: Sequence[Candidate]) -> None:
        self._steps_left, self._planned = PLAN_STEPS, frozenset(decoding)
        self._speedups.clear()
        planned = [] if self.costs.guessed else [c for c in candidates if c.ready or c.worth_tracking]
        self.current = best_plan(len(decoding), planned, self.costs, self.acceptance, self._margin)
        if self.confidence is not None:
            self._price_early_exit(self.confidence, candidates)
        if self._probe is not None and (self._probe.candidate is None) != bool(self.current.budgets):
            self._probe = None
        if self._probe is None and candidates:
            self._probe = self._next_probe(candidates)

    @property
    def _margin(self) -> float:
        """Hysteresis: drafts begin only if they promise clearly more than is required of those under way."""
        return GAIN if self.current.budgets else 2 * GAIN

    def should_track(self, candidate: Candidate, batch: int, tokens: int, unread: int = 0) -> bool:
        _, drafter, allowed, sampled, *_ = candidate
        key = drafter, allowed, sampled, batch
        plain = self.costs.plain(batch)
        if key not in self._speedups:  # all are assumed to be drafted for alike
            gains = self.acceptance.gains(UNSEEN, drafter, allowed, sampled)
            self._speedups[key] = plain * max(
                (1 + gain) / (self.costs.verify(batch, batch * (1 + n)) + self.costs.draft(drafter, batch, depth))
                for (n, depth), gain in gains.items()
            )
        speedup = self._speedups[key]
        saved_s = tokens * plain / batch * (1 - 1 / speedup)
        return speedup > 1 + self._margin and saved_s > self.costs.read(drafter, unread)

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        if self._probe is None:
            granted = self.current.budgets.get(request_id, NOTHING)
        else:
            probed = self._probe.candidate
            granted = probed.allowed if probed is not None and probed.request_id == request_id else NOTHING
        return Budget(min(granted.nodes, allowed.nodes), min(granted.depth, allowed.depth))

    def _price_early_exit(self, confidence: Confidence, candidates: Sequence[Candidate]) -> None:
        """Leave the length of planned chains to early exit: raise their budgets to all that is allowed.

        Also sets the prices of a row and of a level. If scoring costs more than it saves, it is turned off instead.
        """
        confidence.scoring, confidence.prices = True, None
        plan, batch, costs, drafter = self.current, len(self._planned), self.costs, confidence.drafter
        if not plan.budgets:
            return
        scored = {c.request_id: c.allowed for c in candidates if c.drafter == drafter and c.request_id in plan.budgets}
        tokens = sum(plan.budgets[name].depth for name in scored)
        seconds = costs.verify(batch, batch + tokens) + costs.draft(drafter, len(scored), plan.depth)
        confidence.scoring = tokens * SCORED_TOKEN_S < seconds
        if not confidence.scoring:
            return
        rows = batch + sum(budget.nodes for budget in plan.budgets.values())
        row = (costs.verify(batch, 2 * rows) - costs.verify(batch, rows)) / rows
        one, all_ = (costs.draft(drafter, n, 2) - costs.draft(drafter, n, 1) for n in (1, batch))
        step = max(0.0, all_ - one) / max(1, batch - 1)
        confidence.prices = Prices(*(plan.speed * max(0.0, cost) for cost in (row, step, one - step)))
        self.current = plan._replace(budgets={**plan.budgets, **scored})

    def _next_probe(self, candidates: Sequence[Candidate]) -> Probe | None:
        """Return a probe of plain steps if drafts are planned, else of one request, in rotation; None if not earned.

        The first plain steps of a batch size may be earned later, and drafts that correct a guess need not be.
        """
        batch = len(self._planned)
        plain, credit_s = self.costs.plain(batch), self._credit_s
        if self.current.budgets:
            probe, price = Probe(None, 2 * PLAN_STEPS), 2 * SETTLES_S + plain
            least = price if self.costs.knows_plain(batch) else 0.0
        else:
            ready = [candidate for candidate in candidates if candidate.ready] or candidates
            chosen = ready[self._turn % len(ready)]
            (nodes, depth), warm_up = chosen.allowed, chosen.warm_up
            price = self.costs.verify(batch, batch + nodes) + self.costs.draft(chosen.drafter, 1, depth) - plain
            price += warm_up * TRACKING_SHARE * self.costs.plain(1)
            probe, least = Probe(chosen, 2 * warm_up or 1), price
            if self.costs.guessed and credit_s > 0:  # a plain step was seen
                least = price = 0.0
        self._credit_s = min(credit_s, price)
        if self._credit_s < least:
            return None
        self._turn, self._credit_s = self._turn + 1, self._credit_s - price
        return probe

    # ---- what came of it -------------------------------------------------------------------------------------------

    def record_draft(self, history: History, drafter: str, sampled: bool, draft: VerifiedDraft) -> None:
        if not draft.depth:
            return
        accepted, expected = len(draft.path), None
        self._depths.setdefault(drafter, []).append(draft.depth)
        if self.confidence is not None:
            expected = self.confidence.update(history, sampled, draft.depth, accepted)
        if expected is None:
            expected = self.acceptance.expected(history, drafter, draft, sampled)
        self.acceptance.record(history, drafter, draft, expected, sampled)
        if self._probe is not None and self._probe.candidate is not None:
            self._credit_s += accepted * self.costs.plain(len(self._planned)) / len(self._planned)
            self._end_probe()

    def record_step(self, batch: int, rows: int, drafting: float | None, seconds: float) -> None:
        self._credit_s += self._probe_share * seconds
        stretch, costs = self._stretch, self.costs
        review = stretch.add(rows > batch, seconds, planned=bool(self.current.budgets))
        self._steps_left = self._steps_left if review is None else min(self._steps_left, review)
        costs.settled = stretch.judged
        if rows == batch:
            if costs.settled or costs.knows_plain(batch):  # the first is not to be a slow one
                costs.learn_plain(batch, seconds - (drafting or 0.0))
            if stretch.seconds >= 2 * SETTLES_S and self._probe is not None and self._probe.candidate is None:
                self._end_probe()  # several short steps: one may have been slow by chance
            return
        if len(self._depths) == 1:
            ((drafter, depths),) = self._depths.items()
            counts = [sum(depth > level for depth in depths) for level in range(max(depths))]
            costs.learn_drafted(batch, rows, drafter, counts, seconds, drafting)

    def _end_probe(self) -> None:
        """End the probe and plan anew, since it may have shown that another plan pays."""
        self._probe, self._steps_left = None, 0

    @property
    def forecast(self) -> Forecast | None:
        plan = self.current
        errors = self.confidence.errors if self.confidence is not None else None
        return Forecast(plan.depth if plan.budgets else 0, plan.speedup, self.acceptance.bias, errors)
