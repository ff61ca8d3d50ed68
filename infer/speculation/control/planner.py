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

from infer.speculation.budget import NOTHING, Budget, VerifiedDraft, candidate_budgets
from infer.speculation.control.acceptance_model import AcceptanceBucket, AcceptanceModel
from infer.speculation.control.baseline_probe import BaselineProbe
from infer.speculation.control.batch_plan import MIN_GAIN, Candidate, Plan, best_plan, drafted_for, with_new_requests
from infer.speculation.control.confidence import DRAFTER, Confidence, Prices
from infer.speculation.control.cost_model import CostModel
from infer.speculation.control.trials import TRIAL_SHARE, TRIAL_STEPS

# What tracking (keeping features) adds to a step without drafts, as a share of a plain step of one request; hardly more
# for several requests.
TRACKING_COST = 0.05
# By how much the speedup of drafting for a whole batch is overestimated, per other request in it: perhaps only few of
# them are drafted for, while features of all are kept.
BATCH_PENALTY = 0.01
PLAN_STEPS = 16  # steps that a plan stays in force while the batch hardly changes
UPDATE_S = 0.01  # seconds between steps that update the cost model: an update takes 1 % of the shortest steps
CACHE_S = 0.2  # seconds for which the cost of drafting for a whole batch is cached
MIN_LEFT = 0.75  # share of the requests it was made for that must be left for a plan to stay in force
# Scoring chains for an early exit costs the host this many seconds per token, and saves about this share of a step.
SCORING_S, SCORING_SAVES = 100e-6, 0.05
PROBE_SHARE = 0.005  # share of the time without drafts that may go into probing whether they would pay again
# Steps of a probe of a request that its drafter does not track: its KV begins at the next page boundary, and the
# drafter must see some tokens before it drafts.
TRACKING_STEPS = 40


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

    def record_step(self, batch: int, rows: int, drafting: float | None, seconds: float) -> None:
        """Record a step without prefill.

        `drafting`: its seconds in the proposers, None if they cannot be told from the rest; `seconds`: in all.
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

    def record_step(self, batch: int, rows: int, drafting: float | None, seconds: float) -> None:
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
        outdated = candidates is not None and self._outdated(decoding, load)
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
            planned = [] if self.costs.guessed else [c for c in candidates if c.ready or c.worth_tracking]
            batch, depth = len(decoding), self.current.depth
            self.current = best_plan(batch, planned, self.costs, self.acceptance, depth, self._start_margin(batch))
            if self.confidence is not None and self.current.budgets:
                self._enable_early_exit(self.confidence)
        elif candidates is not None and self._has_new(decoding):
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
        num_covered = min(before, len(decoding))
        if self.current.budgets:
            num_covered = len(set(decoding) & set(self._decoding))
        return num_covered < MIN_LEFT * len(decoding)

    def should_track(
        self, drafter: str, allowed: Budget, batch: int, ahead: Mapping[AcceptanceBucket, int], unread: int = 0
    ) -> bool:
        plain, saved_s = self.costs.plain(batch) / batch, -self.costs.read(drafter, unread)
        tracking_cost = TRACKING_COST * self.costs.plain(1) / self.costs.plain(batch)
        min_speedup = 1 + MIN_GAIN + self._start_margin(batch)
        for tokens, speedup in zip(ahead.values(), self._speedups(drafter, allowed, batch, ahead), strict=True):
            # The cost of plain steps was learnt with tracked requests.
            gain = speedup / (1 + tracking_cost + BATCH_PENALTY * (batch - 1))
            saved_s += tokens * plain * (1 - 1 / gain if gain > min_speedup else -tracking_cost)
        return saved_s > 0

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
        key = drafter, allowed, batch
        if key not in self._seconds:
            budgets = candidate_budgets(allowed)
            rows = batch * np.array([1.0 + budget.nodes for budget in budgets])
            drafting = np.array([self.costs.draft(drafter, batch, budget.depth) for budget in budgets])
            self._seconds[key] = (self.costs.verify(batch, rows) + drafting).tolist()
        seconds, tokens = self._seconds[key], ahead.values()
        # Accepted tokens by bucket and budget. For so few numbers lists are faster than arrays.
        sums = [self.acceptance.gains("", drafter, allowed, bucket) for bucket in ahead]
        others = [sum(map(mul, tokens, level)) / sum(tokens) for level in zip(*sums, strict=True)]
        plain = self.costs.plain(batch) / batch
        return [
            max((batch + n + (batch - 1) * m) / s for n, m, s in zip(gains, others, seconds, strict=True)) * plain
            for gains in sums
        ]

    def skips(self, request_id: str) -> bool:
        drafts = request_id in self.current.budgets or (self._probe and self._probe.request_id == request_id)
        return self._baseline.probing or not drafts

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        if self.skips(request_id):
            return NOTHING
        granted = self.current.budgets.get(request_id, NOTHING)
        if self._probe is not None and self._probe.request_id == request_id:
            granted = self._probe.budget
        return Budget(min(granted.nodes, allowed.nodes), min(granted.depth, allowed.depth))

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

    def record_step(self, batch: int, rows: int, drafting: float | None, seconds: float) -> None:
        self._unlearnt_s += seconds
        self._cached_s += seconds
        due = self._unlearnt_s >= UPDATE_S
        if due:
            self._unlearnt_s = 0.0
        if rows == batch:
            self._credit += (TRIAL_SHARE if self.costs.guessed else PROBE_SHARE) * seconds
            self._quiet_s += seconds
            settled = self._baseline.plain(seconds, self.costs.plain(batch))
            if settled and (self._baseline.probing or due):
                self.costs.learn(batch=batch, rows=rows, seconds=seconds - (drafting or 0.0))
            self._before = (), {}
            return
        self._baseline.drafted(seconds)
        if on_trial := self._on_trial():
            budgets, due = {c.request_id: c.allowed for c in on_trial}, True
            before, self._before = self._before, (on_trial, budgets)
        else:
            budgets = self.current.budgets
            before, self._before = self._before, (self._candidates, budgets)
        if not due:
            return
        drafted = drafted_for(*self._before)
        drafters = {c.drafter for c in drafted}
        if drafting is None:
            if len(drafters) == 1:  # drafting is assumed to take the predicted share of the step
                drafts = self.costs.draft(drafted[0].drafter, batch, self.current.depth)
                verify = float(self.costs.verify(batch, float(rows)))
                self.costs.learn(batch=batch, rows=rows, seconds=seconds * verify / (verify + drafts))
                self.costs.tried()
            return
        slow = self.costs.learn(batch=batch, rows=rows, seconds=seconds - drafting)
        earlier = {c.request_id for c in drafted_for(*before)}
        if len(drafters) == 1 and {c.request_id for c in drafted} <= earlier:  # else drafters may have read prompts too
            if self.confidence is not None and self.confidence.scoring and drafted[0].drafter == DRAFTER:
                counts = self.confidence.counts
            else:
                depths = [budgets[c.request_id].depth for c in drafted]
                counts = [sum(depth > level for depth in depths) for level in range(max(depths))]
            # What slows the verify of a step slows its drafts as well, so it says nothing of drafting: divide it out.
            self.costs.learn_draft(drafted[0].drafter, counts, drafting / slow)
            self.costs.tried()

    def _on_trial(self) -> list[Candidate]:
        """Return the one request that is drafted for to learn what drafting costs; empty if there is none."""
        if self._probe is None or not self.costs.guessed:
            return []
        name = self._probe.request_id
        return [candidate._replace(ready=True) for candidate in self._candidates if candidate.request_id == name]

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
        scored = {
            candidate.request_id: candidate.allowed for candidate in self._candidates if candidate.drafter == DRAFTER
        }
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
        probe = self._probe
        if probe is not None and probe.steps > 1 and probe.request_id in decoding:
            probe.steps -= 1
            return probe
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
        ready = [candidate for candidate in self._candidates if candidate.ready] or self._candidates
        chosen, plain = ready[self._turn % len(ready)], self.costs.plain(batch)
        nodes, depth = chosen.allowed
        price = self.costs.verify(batch, float(batch + nodes)) - plain + self.costs.draft(chosen.drafter, 1, depth)
        price += self._baseline.switch_s
        return chosen, price if chosen.ready else price + TRACKING_STEPS * TRACKING_COST * self.costs.plain(1)
