"""The controller and its inputs: cost model, acceptance model, plans against all possible plans, bounded probes."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.console.card import describe_costs
from infer.speculation.budget import NOTHING, Budget, VerifiedDraft, candidate_budgets
from infer.speculation.control import planner as planning
from infer.speculation.control.acceptance_model import AGES, LATE, AcceptanceBucket, AcceptanceModel
from infer.speculation.control.baseline_probe import DRAFTED_STEPS, SETTLES_S
from infer.speculation.control.batch_plan import HYSTERESIS, MIN_GAIN, Candidate, best_plan, split_into_pieces
from infer.speculation.control.confidence import Confidence
from infer.speculation.control.cost_model import DECAY, ContextCost, CostModel, CostTable, Curve
from infer.speculation.control.planner import PLAN_STEPS, PROBE_SHARE, TRACKING_STEPS, Controller
from infer.speculation.control.profiler import (
    LONG_TOKENS,
    MAX_REPEATS,
    PROMPT_TOKENS,
    START_S,
    Stopwatch,
    Work,
    kept_table,
    measure,
)
from tests.drafts import chain


def make_costs(row: float, draft: float, fixed: float = 10.0, around: float = 1.0) -> CostModel:
    """Return costs in ms: a verify takes `fixed` plus `row` per row, drafting `draft` per level, the rest `around`."""
    batches = (1, 4, 16)
    verify = tuple(Curve((b, 8.0 * b), (fixed + row * b, fixed + 8 * row * b)) for b in batches)
    drafts = tuple(Curve((1.0, 4.0), (draft, 4 * draft)) for _ in batches)
    return CostModel(CostTable(batches, verify, (around,) * 3, {"head": drafts}))


def chains(count: int, depth: int) -> list[Candidate]:
    return [Candidate(str(index), "head", Budget(depth, depth)) for index in range(count)]


def with_rates(rates: list[float]) -> AcceptanceModel:
    """Return an acceptance model with much evidence that request i's drafts are right at `rates[i]` at every depth."""
    acceptance, rng = AcceptanceModel(), random.Random(0)
    for index, rate in enumerate(rates):
        for _ in range(300):
            right = next((place for place in range(4) if rng.random() > rate), 4)
            acceptance.record(str(index), "head", chain(4, right), 0.0)
    return acceptance


def test_curves_go_on_past_their_ends_and_never_below_zero():
    curve = Curve((2.0, 4.0), (10.0, 14.0))
    assert [float(curve(size)) for size in (2.0, 3.0, 4.0, 6.0, -9.0)] == [10.0, 12.0, 14.0, 18.0, 0.0]
    assert Curve((3.0,), (5.0,))(9.0) == 5.0


def test_costs_lie_between_the_measured_batches_and_are_corrected_by_steps():
    costs = make_costs(row=1.0, draft=2.0)
    assert costs.verify(1, 3.0) == pytest.approx(14.0)
    assert costs.verify(2, 6.0) == pytest.approx(17.0)
    assert costs.verify(32, 64.0) == pytest.approx(75.0)
    assert costs.draft("head", 2, 3) == pytest.approx(6.0)
    assert costs.draft("ngram", 2, 3) == 0.0
    for _ in range(600):  # plain steps and further rows take 1.5 times as long as predicted
        costs.learn(batch=1, rows=1, seconds=18.0)
        costs.learn(batch=1, rows=8, seconds=28.5)
        costs.learn_draft("head", [2, 2, 2], 3.0)
        costs.learn_draft("head", [2], 1.0)
    assert costs.verify(1, 1.0) == pytest.approx(18.0, rel=0.01)
    assert costs.verify(1, 8.0) == pytest.approx(28.5, rel=0.01)
    assert costs.draft("head", 1, 1) == pytest.approx(1.0, rel=0.01)
    costs.learn(batch=1, rows=1, seconds=1000.0)  # the machine stalled: an outlier, which is ignored
    assert costs.verify(1, 1.0) == pytest.approx(18.0, rel=0.01)


def with_context(costs: CostModel, first: float, further: float, level: float) -> CostModel:
    return CostModel(replace(costs.table, context=100, beyond=ContextCost(first, further, {"head": level})))


def test_longer_requests_cost_more():
    costs = with_context(make_costs(row=1.0, draft=2.0), first=0.01, further=0.002, level=0.003)
    short = costs.plain(4), costs.verify(4, 12.0), costs.draft("head", 4, 3)
    costs.set_context([10, 10])  # shorter than the measured context
    assert (costs.plain(4), costs.verify(4, 12.0), costs.draft("head", 4, 3)) == short
    costs.set_context([200, 400, 500, 100])
    assert costs.plain(4) - short[0] == pytest.approx(4 * 200 * 0.01)
    assert costs.verify(4, 12.0) - short[1] == pytest.approx(4 * 200 * 0.01 + 8 * 200 * 0.002)
    assert costs.draft("head", 4, 3) - short[2] == pytest.approx(4 * 3 * 200 * 0.003)
    assert costs.verify(4, np.array([4.0, 12.0])) == pytest.approx([costs.plain(4), costs.verify(4, 12.0)])


@pytest.mark.parametrize(
    ("row", "cost", "pays"), [(30.0, (0.02, 0, 0), True), (0.5, (0, 0.02, 0), False), (0.5, (0, 0, 0.02), False)]
)
def test_context_decides_whether_drafting_pays(row, cost, pays):
    """Context that slows plain steps favours drafting; context that slows further rows or drafts does the opposite."""
    for context, drafts in ((100, not pays), (2000, pays)):
        controller = Controller(with_context(make_costs(row, draft=0.5), *cost), with_rates([0.6]))
        controller.plan(("0",), 1, [candidate._replace(context=context) for candidate in chains(1, 4)])
        assert bool(controller.current.budgets) == drafts


class KnownMachine:
    """An engine with a simulated clock, whose steps take the time given by a formula."""

    FIXED, FIRST, FURTHER, LEVEL, PLAIN, READ, READS = (1e-3 * ms for ms in (10.0, 2.0, 1.0, 0.5, 0.25, 0.03, 0.01))
    CONTEXT = ContextCost(0.01e-3, 0.002e-3, {"head": 0.004e-3})

    def __init__(self, holds: int) -> None:
        self.holds, self.now = holds, 0.0

    def start(self, prompts, params, check):
        check()
        room = self.holds
        self.now += self.READS * sum(map(len, prompts))
        requests = []
        for prompt in prompts:
            room -= len(prompt) + params.max_tokens
            if room >= 0:
                requests.append(SimpleNamespace(context=len(prompt), computed=len(prompt)))
        self.requests = requests
        return requests

    def discard(self, requests) -> None:
        assert requests is self.requests

    def step(self) -> None:
        self.verify(self.requests, 0)
        self.now += self.PLAIN

    def verify(self, requests, drafts: int) -> None:
        further = [request.context - PROMPT_TOKENS for request in requests]
        first, rest = self.FIRST * len(requests), self.FURTHER * len(requests) * drafts
        self.now += self.FIXED + first + rest + sum(further) * (self.CONTEXT.first + self.CONTEXT.further * drafts)

    def draft(self, requests, budget) -> None:
        further = sum(request.context - PROMPT_TOKENS for request in requests)
        self.now += budget.depth * (self.LEVEL * len(requests) + self.CONTEXT.levels["head"] * further)

    def prefill_drafter(self, requests) -> None:
        self.now += self.READ * sum(request.computed for request in requests)


def profile(machine: KnownMachine, context: int = 4096, max_batch: int = 4) -> CostTable:
    sizes = {"vocab_size": 50, "context": context, "max_batch": max_batch, "max_rows": 99}
    return measure(machine, {"head": Budget(4, 4)}, clock=lambda: machine.now, **sizes)


@pytest.mark.parametrize(("context", "holds", "beyond"), [(4096, 99999, True), (150, 99999, False), (4096, 800, False)])
def test_a_known_machine_is_measured_as_it_is(context, holds, beyond):
    machine = KnownMachine(holds)
    table = profile(machine, context=context)
    assert (table.batches, table.context) == ((1, 2, 4), PROMPT_TOKENS)
    costs = CostModel(table)
    assert costs.plain(2) == pytest.approx(14.25e-3)
    assert costs.verify(4, 12.0) == pytest.approx(26.25e-3)
    assert costs.draft("head", 4, 3) == pytest.approx(6e-3)
    assert costs.read("head", 200) == pytest.approx(6e-3)
    assert costs.read("ngram", 200) == 0.0
    context_cost = table.beyond
    measured = (context_cost.first, context_cost.further, context_cost.levels.get("head", 0.0))
    assert measured == (pytest.approx((0.01e-3, 0.002e-3, 0.004e-3)) if beyond else (0.0, 0.0, 0.0))
    assert CostTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    costs.set_context([LONG_TOKENS])
    assert (costs.plain(1) > 20e-3) == beyond
    assert machine.now < START_S


def test_what_follows_a_large_work_is_timed_when_it_has_settled():
    """The small work takes 1 ms, or 2 ms for a while after the large one; `again=False`: one run per turn."""
    now, settled, steps = 0.0, 0.0, 0

    def small() -> None:
        nonlocal now
        now += 1e-3 if now >= settled else 2e-3

    def large() -> None:
        nonlocal now, settled
        now += 0.1
        settled = now + 6e-3

    def once() -> None:
        nonlocal now, steps
        now, steps = now + 1e-3, steps + 1

    watch = Stopwatch(lambda: now, 9.0)
    seconds = watch.timed([Work(small), Work(once, again=False), Work(large)], 1.0)
    assert seconds == pytest.approx((1e-3, 1e-3, 0.1))
    assert steps == 1 + MAX_REPEATS


def test_a_machine_that_holds_no_request_cannot_be_measured():
    with pytest.raises(ValueError, match="no request of 96 tokens fits"):
        profile(KnownMachine(90))


def test_a_draft_whose_chains_end_one_by_one_teaches_what_a_level_costs():
    """A level costs 1 plus 1 per request; the machine is half as fast as when it was profiled."""
    batches = (1, 2, 4)
    drafts = tuple(Curve((1.0, 4.0), (1.0 + batch, 4 * (1.0 + batch))) for batch in batches)
    verify = tuple(Curve((float(batch),), (10.0,)) for batch in batches)
    costs = CostModel(CostTable(batches, verify, (0.0,) * 3, {"head": drafts}))
    for _ in range(600):
        costs.learn_draft("head", [4, 2, 1], 2 * (5.0 + 3.0 + 2.0))
    assert costs.draft("head", 4, 1) == pytest.approx(10.0, rel=0.01)
    assert costs.draft("head", 1, 4) == pytest.approx(16.0, rel=0.01)


def test_rows_that_took_no_time_when_they_were_measured_can_become_dear():
    verify = (Curve((1.0, 4.0), (10.0, 9.9)), Curve((4.0, 64.0), (10.0, 70.0)))
    costs = CostModel(CostTable((1, 4), verify, (0.0, 0.0), {}))
    assert costs.verify(1, 4.0) == pytest.approx(10.9)
    assert costs.verify(1, np.array([1.0, 4.0])) == pytest.approx([10.0, 10.9])
    for _ in range(600):
        costs.learn(batch=1, rows=1, seconds=10.0)
        costs.learn(batch=1, rows=4, seconds=12.0)
    assert costs.plain(1) == pytest.approx(10.0, rel=0.05)
    assert costs.verify(1, 4.0) == pytest.approx(12.0, rel=0.05)


def test_what_drafts_bring_along_is_told_from_what_rows_cost():
    """A speculative step takes 4 more than its rows, and these cost what was profiled."""
    costs, table, rng = make_costs(row=1.0, draft=2.0), make_costs(row=1.0, draft=2.0), random.Random(0)
    for _ in range(3000):
        rows = rng.randint(2, 6)
        costs.learn(batch=1, rows=1, seconds=table.plain(1))
        costs.learn(batch=1, rows=rows, seconds=table.verify(1, float(rows)) + 4.0)
    for rows in (2.0, 6.0):
        assert costs.verify(1, rows) == pytest.approx(table.verify(1, rows) + 4.0, rel=0.02)
    assert costs.verify(1, np.array([1.0, 6.0])) == pytest.approx([costs.plain(1), costs.verify(1, 6.0)])
    assert costs.verify(4, 8.0) == pytest.approx(table.verify(4, 8.0), rel=0.02)


def test_what_rows_cost_in_small_batches_says_nothing_of_larger_ones():
    costs, table = make_costs(row=1.0, draft=2.0), make_costs(row=1.0, draft=2.0)
    for _ in range(200):
        costs.learn(batch=3, rows=3, seconds=table.plain(3))
        costs.learn(batch=3, rows=9, seconds=table.plain(3) + 12.0)
    for batch, times in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 1), (16, 1), (30, 1)):
        taught = costs.verify(batch, 3.0 * batch) - costs.plain(batch)
        assert taught == pytest.approx(times * (table.verify(batch, 3.0 * batch) - table.plain(batch)), rel=0.03), batch


def test_what_drafts_have_taught_fades_while_nobody_drafts():
    costs, table = make_costs(row=1.0, draft=2.0), make_costs(row=1.0, draft=2.0)
    for _ in range(600):
        costs.learn(batch=1, rows=1, seconds=table.plain(1))
        costs.learn(batch=1, rows=8, seconds=table.plain(1) + 20.0)
        costs.learn_draft("head", [1, 1], 12.0)
    assert costs.draft("head", 1, 2) == pytest.approx(12.0, rel=0.01)
    assert costs.verify(1, 8.0) > table.verify(1, 8.0) + 5.0
    controller, nobody = (
        Controller(costs, AcceptanceModel()),
        [candidate._replace(ready=False, worth_tracking=False) for candidate in chains(1, 4)],
    )
    for _ in range(70 * PLAN_STEPS):
        controller.plan(("0",), 1, nobody)
        controller.record_step(1, 1, 0.0, table.plain(1))
    assert costs.draft("head", 1, 2) == pytest.approx(table.draft("head", 1, 2), rel=0.01)
    assert costs.verify(1, 8.0) == pytest.approx(table.verify(1, 8.0), rel=0.01)


def test_what_drafts_have_taught_fades_by_the_second_and_is_then_learnt_anew_soon():
    costs, table = make_costs(row=1.0, draft=2.0), make_costs(row=1.0, draft=2.0)

    def beyond() -> float:
        return float(costs.verify(1, 8.0)) - float(table.verify(1, 8.0))

    for _ in range(100):
        costs.learn(batch=1, rows=1, seconds=table.plain(1))
    for _ in range(300):
        costs.learn(batch=1, rows=8, seconds=float(table.verify(1, 8.0)) + 5.0)
    learnt = beyond()
    costs.learn(batch=1, rows=8, seconds=float(table.verify(1, 8.0)))
    slowly = (learnt - beyond()) / learnt
    for _ in range(300):
        costs.learn(batch=1, rows=8, seconds=float(table.verify(1, 8.0)) + 5.0)
    learnt = beyond()
    for part in (0.25, 0.75, 1.0):  # 2 seconds in several parts
        costs.decay(part)
    assert beyond() == pytest.approx(DECAY**2 * learnt, rel=0.05)
    costs.decay(100.0)
    faded = beyond()
    assert faded == pytest.approx(0.0, abs=0.05 * learnt)
    costs.learn(batch=1, rows=8, seconds=float(table.verify(1, 8.0)) + 5.0)
    assert (beyond() - faded) / 5.0 > 4 * slowly


def test_a_probe_pays_for_the_change_back_too():
    controller = Controller(make_costs(row=9.0, draft=9.0), AcceptanceModel())
    controller.plan(("0",), 1, chains(1, 4))
    _, price = controller._price_probe(1)
    controller._baseline.switch_s = 2.5
    assert controller._price_probe(1)[1] == pytest.approx(price + 2.5)


def test_the_first_plain_steps_tell_how_fast_the_machine_is_now():
    costs, table = make_costs(row=1.0, draft=2.0), make_costs(row=1.0, draft=2.0)
    for seconds in (0.5, 0.6, 0.4, 0.5):
        costs.learn(batch=1, rows=1, seconds=seconds * table.plain(1))
    assert costs.plain(1) == pytest.approx(0.5 * table.plain(1), rel=0.05)


def test_who_always_drafts_still_hears_what_a_plain_step_costs():
    """Plain steps take half the profiled time, speculative ones all of it, and drafting pays at either cost."""
    controller, table = Controller(make_costs(row=1.0, draft=0.1), with_rates([0.95] * 4)), make_costs(1.0, 0.1)
    plain_steps, steps = 0, 20 * DRAFTED_STEPS
    for _ in range(steps):
        controller.plan(tuple("0123"), 4, chains(4, 4))
        rows = 4 + sum(controller.budget(name, Budget(4, 4)).nodes for name in "0123")
        plain_steps += rows == 4
        verify = float(table.verify(4, float(rows)))
        controller.record_step(4, rows, 0.4 if rows > 4 else 0.0, verify + 0.4 if rows > 4 else 0.5 * verify)
    assert controller.current.budgets
    assert 0 < plain_steps <= 2 * steps / DRAFTED_STEPS
    assert controller.costs.plain(4) == pytest.approx(0.5 * table.plain(4), rel=0.15)
    rows = 4 + sum(budget.nodes for budget in controller.current.budgets.values())
    assert controller.costs.verify(4, float(rows)) == pytest.approx(float(table.verify(4, float(rows))), rel=0.1)


def test_of_short_steps_only_some_teach_what_they_cost(monkeypatch):
    """Of 1 ms steps, speculative or plain, one in ten is learnt from, of 0.5 s steps every one; plain steps are learnt
    from once the machine has settled.
    """
    costs, learnt = make_costs(row=0.1, draft=0.1), []
    monkeypatch.setattr(costs, "learn", lambda **step: learnt.append(step["rows"]) or 1.0)
    controller = Controller(costs, AcceptanceModel())
    for rows, seconds, taught in ((3, 1e-3, 10), (1, 1e-3, 10 - 1000 * SETTLES_S / 10), (3, 0.5, 100), (1, 0.5, 99)):
        learnt.clear()
        for _ in range(100):
            controller.record_step(1, rows, 0.0, seconds)
        assert (len(learnt), set(learnt)) == (pytest.approx(taught, abs=1), {rows})


def test_who_comes_while_others_are_drafted_for_is_so_too_and_changes_no_plan(monkeypatch):
    controller, plans = Controller(make_costs(row=0.1, draft=0.1), with_rates([0.9] * 4)), []
    original = planning.best_plan
    monkeypatch.setattr(planning, "best_plan", lambda *item: plans.append(item[0]) or original(*item))
    sampled = Candidate("s", "head", Budget(4, 4), bucket=AcceptanceBucket(sampled=True))
    other = Candidate("o", "ngram", Budget(4, 4))
    unwoken = Candidate("u", "head", Budget(4, 4), ready=False, worth_tracking=False)

    def plan(names: str, load: int) -> dict[str, int]:
        candidates = [item._replace(request_id=name) for item, name in zip(chains(len(names), 4), names, strict=True)]
        candidates = [{"s": sampled, "o": other, "u": unwoken}.get(item.request_id, item) for item in candidates]
        controller.plan(tuple(names), load, candidates)
        return {name: controller.budget(name, Budget(4, 4)).depth for name in names}

    depth = plan("abcd", 4)["a"]
    assert depth > 0
    assert plan("abc", 4)["a"] == depth  # one request has ended, another is about to be admitted
    assert plan("abce", 4) == dict.fromkeys("abce", depth)
    for names in ("abces", "abceso", "abcesou"):  # the plan has no request like the newest one
        assert plan(names, len(names)) == {**dict.fromkeys(names, 0), **dict.fromkeys("abce", depth)}
    assert plan("a", 7)["a"] == depth
    assert plans == [4]
    assert plan("avxyz", 5)["v"] > 0  # too many requests are new: a new plan
    assert plans == [4, 5]
    plan("av", 2)  # too many requests have ended: a new plan
    assert plans == [4, 5, 2]


def test_to_begin_drafting_must_gain_what_changing_back_costs():
    costs = make_costs(row=0.1, draft=0.1)
    again, acceptance = make_costs(row=0.1, draft=0.1), with_rates([0.9] * 4)
    gain = best_plan(4, chains(4, 4), costs, acceptance, 0).speedup - 1
    assert best_plan(4, chains(4, 4), costs, acceptance, 0, gain - 2 * MIN_GAIN).budgets
    assert not best_plan(4, chains(4, 4), costs, acceptance, 0, gain).budgets
    controller = Controller(again, acceptance)
    ahead, lost = AcceptanceBucket.counts(0.0, 64, 128), 2 * gain * PLAN_STEPS * again.plain(4)
    assert controller.should_track("head", Budget(4, 4), 4, ahead)
    controller._baseline.switch_s = lost
    assert not controller.should_track("head", Budget(4, 4), 4, ahead)
    controller.plan(tuple("0123"), 4, chains(4, 4))
    assert not controller.current.budgets
    controller._baseline.switch_s = 0.0
    for _ in range(PLAN_STEPS):
        controller.plan(tuple("0123"), 4, chains(4, 4))
    assert controller.current.budgets
    controller._baseline.switch_s = lost  # the switching cost does not matter while drafting
    assert controller.should_track("head", Budget(4, 4), 4, ahead)


@pytest.mark.parametrize(
    ("count", "milliseconds", "scored"), [(4, 1.0, False), (1, 0.3, False), (1, 10.0, True), (4, 100.0, True)]
)
def test_chains_are_judged_where_a_step_takes_long_enough(count, milliseconds, scored):
    table = make_costs(row=0.3, draft=0.1).table

    def scaled(curves: tuple[Curve, ...]) -> tuple[Curve, ...]:
        return tuple(
            Curve(curve.sizes, tuple(milliseconds * 1e-3 * value for value in curve.seconds)) for curve in curves
        )

    drafts = {"head": scaled(table.drafts["head"])}
    costs = CostModel(replace(table, verify=scaled(table.verify), around=(0.0,) * 3, drafts=drafts))
    acceptance = with_rates([0.7] * count)
    controller = Controller(costs, acceptance, Confidence(acceptance))
    names = tuple(map(str, range(count)))
    controller.plan(names, count, chains(count, 4))
    assert controller.current.budgets
    assert controller.confidence.scoring == scored
    assert (controller.confidence.prices is not None) == scored


def test_what_a_draft_costs_whatever_its_depth_is_told_from_what_levels_cost():
    costs = make_costs(row=1.0, draft=2.0)
    for _ in range(600):
        for counts in ([1], [1, 1], [1, 1, 1, 1]):
            costs.learn_draft("head", counts, 5.0 + 1.0 * (len(counts) - 1))
    assert costs.draft("head", 1, 1) == pytest.approx(5.0, rel=0.01)
    assert costs.draft("head", 1, 3) - costs.draft("head", 1, 2) == pytest.approx(1.0, rel=0.01)


def test_a_machine_that_becomes_slower_while_everyone_drafts_makes_plain_steps_dearer_too():
    costs = make_costs(row=1.0, draft=2.0)
    for _ in range(600):
        costs.learn(batch=1, rows=8, seconds=2 * 19.0)
    assert costs.verify(1, 8.0) == pytest.approx(38.0, rel=0.01)
    assert 18.0 < costs.verify(1, 1.0) < 30.0


@pytest.mark.parametrize(("rows", "within"), [(4, 0.001), (12, 0.1)])
def test_a_machine_that_becomes_slower_makes_all_costs_grow_alike(rows, within):
    """Only approximately if all steps seen are speculative: part of the slowdown is attributed to their rows."""
    costs, table = make_costs(row=1.0, draft=2.0), make_costs(row=1.0, draft=2.0)
    for _ in range(300):
        costs.learn(batch=4, rows=rows, seconds=2 * table.verify(4, float(rows)))
        costs.learn_draft("head", [4, 4], 2 * table.draft("head", 4, 2))
    for cost in (lambda cost: cost.plain(4), lambda cost: cost.verify(4, 12.0), lambda cost: cost.draft("head", 4, 3)):
        assert cost(costs) == pytest.approx(2 * cost(table), rel=within)


@given(
    rates=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3),
    row=st.floats(0.01, 8.0),
    draft=st.floats(0.0, 5.0),
)
def test_no_plan_of_chains_is_much_better_than_the_chosen_one(rates, row, draft):
    depth, batch = 3, len(rates)
    costs, acceptance = make_costs(row, draft), with_rates(rates)
    chances = [acceptance.chances(str(index), "head", depth) for index in range(batch)]

    def speed(depths: tuple[int, ...]) -> float:
        tokens = batch + sum(sum(probs[:planned]) for probs, planned in zip(chances, depths, strict=True))
        drafting = costs.draft("head", batch, max(depths)) if max(depths) else 0.0
        return tokens / (costs.verify(batch, float(batch + sum(depths))) + drafting)

    plan = best_plan(batch, chains(batch, depth), costs, acceptance, 0)
    planned = tuple(plan.budgets.get(str(index), NOTHING).depth for index in range(batch))
    best = max(speed(depths) for depths in itertools.product(range(depth + 1), repeat=batch))
    assert plan.speed == pytest.approx(speed(planned), rel=1e-6)
    assert plan.speed >= best / (1 + MIN_GAIN) / (1 + HYSTERESIS)
    assert plan.speed >= speed((0,) * batch)


def test_cheap_rows_are_drafted_and_dear_ones_are_not():
    acceptance = with_rates([0.9, 0.1])
    cheap = best_plan(2, chains(2, 4), make_costs(row=0.1, draft=0.1), acceptance, 0)
    assert cheap.budgets["0"].depth == 4
    assert cheap.budgets.get("1", NOTHING).depth < 4
    assert best_plan(2, chains(2, 4), make_costs(row=20.0, draft=0.1), acceptance, 0).budgets == {}
    assert best_plan(2, chains(2, 4), make_costs(row=0.1, draft=50.0), acceptance, 0).budgets == {}


def tree(path: list[int], nodes: int = 16) -> VerifiedDraft:
    """Return a draft of so many nodes, four deep, of which the nodes in `path` were accepted."""
    return VerifiedDraft(Budget(nodes, 4), nodes, 4, path)


def drawn(rng: random.Random, ranks: list[float], nodes: int) -> VerifiedDraft:
    return tree([node for node, rank in enumerate(ranks[:nodes], start=1) if rng.random() < rank], nodes)


RANKS = [0.8, 0.5, 0.4, 0.2, 0.15, 0.1, 0.08, 0.06] + [0.01] * 8


def test_of_a_tree_the_best_nodes_are_drafted_as_far_as_they_pay():
    """A node gains the acceptance rate observed at its rank and costs a row."""
    acceptance, rng, candidate = AcceptanceModel(), random.Random(0), Candidate("0", "head", Budget(16, 4))
    for _ in range(1000):
        acceptance.record("0", "head", drawn(rng, RANKS, 16), 0.0)
    sizes = []
    for row in (0.01, 1.0, 3.0, 30.0):
        costs = make_costs(row=row, draft=0.1)
        plan = best_plan(1, [candidate], costs, acceptance, 0)
        nodes = plan.budgets.get("0", NOTHING).nodes
        speeds = {n: (1 + sum(RANKS[:n])) / (costs.verify(1, 1.0 + n) + 0.4) for n in range(2, 17, 2) if n != 4}
        best = max(speeds.values())
        assert (speeds[nodes] if nodes else plan.plain) >= (0.97 * best if best > 1.1 * plan.plain else plan.plain)
        sizes.append(nodes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 12 > sizes[1] > sizes[2] > sizes[3] == 0


def test_nodes_that_a_smaller_tree_leaves_out_are_tried_again_when_the_text_changes():
    acceptance, rng, steps = AcceptanceModel(), random.Random(0), []
    candidate, costs = Candidate("0", "head", Budget(16, 4)), make_costs(row=0.3, draft=0.1)
    for ranks in ([0.5, 0.2] + [0.0] * 14, [0.9, 0.8, 0.6] + [0.4] * 4 + [0.25] * 9):
        for _ in range(1500):
            nodes = best_plan(1, [candidate], costs, acceptance, 0).budgets.get("0", NOTHING).nodes
            steps.append(nodes)
            acceptance.record("0", "head", drawn(rng, ranks, nodes or 16), 0.0)
    assert np.mean(steps[1000:1500]) < 6
    assert np.mean(steps[2500:]) > 10


def test_what_is_not_known_of_a_trees_ranks_is_taken_from_those_before():
    acceptance = AcceptanceModel({"head": [0.9, 0.8, 0.7, 0.6]})
    gains = acceptance.gains("0", "head", Budget(16, 4))
    assert gains == pytest.approx([0.9 * (1 - 0.8**budget.nodes) / 0.2 for budget in candidate_budgets(Budget(16, 4))])
    for _ in range(2000):
        acceptance.record("0", "head", tree([1, 2, 5]), 0.0)
    assert acceptance.expected("0", "head", tree([])) == pytest.approx(3.0, abs=0.1)
    assert acceptance.gains("0", "head", Budget(16, 4))[:2] == pytest.approx([2.0, 3.0], abs=0.1)
    acceptance.forget("0")
    assert acceptance._requests_ranks == {}


def test_nodes_that_bring_more_than_those_before_them_are_drafted_with_them():
    """This occurs in a fixed tree, whose nodes are ordered by level."""
    acceptance, rng = AcceptanceModel(), random.Random(0)
    for _ in range(1000):
        acceptance.record("0", "head", drawn(rng, [0.5, 0.02, 0.02, 0.02, 0.9, 0.8] + [0.02] * 10, 16), 0.0)
    pieces = split_into_pieces([Candidate("0", "head", Budget(16, 4))], acceptance)
    assert pieces[0].budget.nodes == 6
    assert pieces[0].gain == pytest.approx(2.26, abs=0.15)
    shares = [piece.gain / piece.rows for piece in pieces]
    assert shares == sorted(shares, reverse=True)
    assert sum(piece.rows for piece in pieces) == 16
    assert sum(piece.gain for piece in pieces) == pytest.approx(sum(acceptance.ranks("0", "head", Budget(16, 4))))
    for row, nodes in ((0.5, 6), (9.0, 0)):
        plan = best_plan(1, [Candidate("0", "head", Budget(16, 4))], make_costs(row=row, draft=0.1), acceptance, 0)
        assert plan.budgets.get("0", NOTHING).nodes == nodes


def test_the_plan_in_force_stays_while_another_is_hardly_better():
    acceptance, costs = with_rates([0.6]), make_costs(row=1.0, draft=0.5)
    depths = {best_plan(1, chains(1, 4), costs, acceptance, force).depth for force in range(5)}
    assert len(depths) > 1  # the depth in force influences the new one
    free = best_plan(1, chains(1, 4), costs, acceptance, 0)
    for force in range(5):
        assert best_plan(1, chains(1, 4), costs, acceptance, force).speed * (1 + HYSTERESIS) >= free.speed


def test_chances_follow_a_request_and_start_from_what_its_drafter_showed():
    acceptance = AcceptanceModel({"head": [0.9, 0.8]})
    assert acceptance.chances("a", "head", 3) == pytest.approx([0.9, 0.72, 0.576])
    for _ in range(16):  # a bad start does not outweigh what training measured
        acceptance.record("a", "head", chain(3, 0), 0.0)
    assert acceptance.chances("b", "head", 1)[0] > 0.5
    for _ in range(300):
        acceptance.record("a", "head", chain(3, 0), 0.0)
    assert acceptance.chances("a", "head", 1)[0] < 0.1
    assert acceptance.chances("b", "head", 1)[0] < 0.2
    for _ in range(60):
        acceptance.record("b", "head", chain(3, 3), 0.0)
    assert acceptance.chances("b", "head", 3)[2] > 0.6 > 0.2 > acceptance.chances("a", "head", 1)[0]
    acceptance.forget("b")
    assert acceptance.chances("b", "head", 1)[0] < 0.8


@pytest.mark.parametrize(("misses", "drafts"), [(8, True), (60, False)])
def test_a_few_misses_in_a_row_end_no_drafts_but_many_do(misses, drafts):
    acceptance, rng = AcceptanceModel(), random.Random(0)

    def others(count: int) -> None:  # right at a rate of 0.45, as drafts for sampled requests are
        for index in range(count):
            right = next((place for place in range(4) if rng.random() > 0.45), 4)
            acceptance.record(f"other {index}", "head", chain(4, right), 0.0)

    others(1000)
    for _ in range(misses):
        acceptance.record("0", "head", chain(4, 0), 0.0)
        others(20)  # keeps the drafter's overall acceptance rate constant
    costs = make_costs(row=0.2, draft=0.2, fixed=2.1, around=0.7)
    assert bool(best_plan(1, chains(1, 4), costs, acceptance, 0).budgets) == drafts


def test_what_a_texts_beginning_shows_says_nothing_of_its_end():
    acceptance = AcceptanceModel({"head": [0.8]})
    for _ in range(300):
        acceptance.record("a", "head", chain(1, 0), 0.0, AcceptanceBucket.of(0.0, emitted=0))
    assert acceptance.chances("b", "head", 1, AcceptanceBucket.of(0.0, AGES[0] - 1))[0] < 0.2
    assert (
        acceptance.chances("a", "head", 1, AcceptanceBucket.of(0.0, AGES[-1]))
        == acceptance.chances("a", "head", 1, LATE)
        == (0.8,)
    )
    assert acceptance.chances("b", "head", 1, AcceptanceBucket.of(0.7, 0)) == (
        0.5,
    )  # the rates measured in training are those of greedy drafts


@pytest.mark.parametrize(
    ("emitted", "end", "counts"),
    [(0, 64, [16, 16, 32]), (20, 36, [12, 4]), (0, 10, [10]), (40, 41, [1]), (5, 5, [0])],
)
def test_what_is_ahead_of_a_text_by_age(emitted, end, counts):
    by_bucket = AcceptanceBucket.counts(0.0, emitted, end)
    assert list(by_bucket.values()) == counts
    assert list(by_bucket) == sorted(by_bucket)


def test_a_short_text_is_not_worth_following_for_what_only_its_end_would_gain():
    controller = Controller(make_costs(row=0.5, draft=0.5), AcceptanceModel({"head": [0.9] * 4}))
    for age in range(len(AGES)):
        for _ in range(300):
            controller.acceptance.record("a", "head", chain(4, 0), 0.0, AcceptanceBucket(False, age))
    outlooks = [
        controller.should_track("head", Budget(4, 4), 4, AcceptanceBucket.counts(0.0, 0, end))
        for end in (16, 32, 34, 256)
    ]
    assert outlooks == [False, False, False, True]


def test_who_is_not_worth_waking_is_not_planned_for():
    for worth_tracking in (True, False):
        controller = Controller(make_costs(row=0.5, draft=0.5), AcceptanceModel({"head": [0.9] * 4}))
        candidates = [candidate._replace(ready=False, worth_tracking=worth_tracking) for candidate in chains(2, 4)]
        controller.plan(tuple(candidate.request_id for candidate in candidates), len(candidates), candidates)
        assert bool(controller.current.budgets) == worth_tracking


def test_the_card_says_what_steps_and_drafts_cost():
    table = make_costs(row=0.001, draft=0.002, fixed=0.01, around=0.001).table
    step, drafting = describe_costs(table)
    assert step == ("step", "12.0 / 15.0 / 27.0 ms at 1 / 4 / 16 requests")
    assert drafting == ("drafting, head", "8.0 / 8.0 / 8.0 ms, 4 deep for all")
    assert describe_costs(None) == []
    assert describe_costs(replace(table, reads={"head": 3e-5}))[-1] == (
        "reading, head",
        "30 ms for 1000 tokens of a prompt",
    )
    beyond = ContextCost(first=3e-6, further=5e-7, levels={"head": 1e-6})
    assert describe_costs(replace(table, beyond=beyond))[-1] == (
        "1000 tokens of context",
        "add 3 ms a request, 0.5 ms a further row, 1 ms a level of head",
    )


def test_in_a_large_batch_drafts_must_promise_more():
    verify = tuple(Curve((batch, 8.0 * batch), (10.0, 10.0)) for batch in (1.0, 16.0))  # rows are free
    drafts = tuple(Curve((1.0, 4.0), (4.0, 16.0)) for _ in range(2))
    costs = CostModel(CostTable((1, 16), verify, (0.0, 0.0), {"head": drafts}))
    controller = Controller(costs, AcceptanceModel({"head": [0.7] * 4}))
    promised = [controller._speedups("head", Budget(4, 4), batch, {LATE: 1})[0] for batch in (1, 16)]
    assert promised[0] == pytest.approx(promised[1])
    assert [controller.should_track("head", Budget(4, 4), batch, {LATE: 64}) for batch in (1, 16)] == [True, False]


def test_in_a_large_batch_others_are_drafted_for_at_their_own_ages():
    """Greedy drafts are right from token 32 on: alone, earlier tokens gain nothing; in a large batch all gain alike."""
    acceptance = AcceptanceModel()
    for bucket, right in ((AcceptanceBucket.of(0.0, 0), 0), (AcceptanceBucket.of(0.0, 40), 4)):
        for index in range(600):
            acceptance.record(str(index), "head", chain(4, right), right, bucket)
    controller = Controller(make_costs(row=0.01, draft=0.01), acceptance)
    half = {AcceptanceBucket.of(0.0, 0): 16, AcceptanceBucket.of(0.0, 40): 16}
    (early, late), (young, old) = (controller._speedups("head", Budget(4, 4), batch, half) for batch in (1, 100))
    assert (early, late) == (pytest.approx(1.0, abs=0.1), pytest.approx(5.0, rel=0.1))
    assert young == pytest.approx(old, rel=0.1)
    assert early < young < late


def test_a_prompt_that_its_drafter_would_have_to_read_must_be_worth_it():
    costs = CostModel(replace(make_costs(row=0.5, draft=0.5).table, reads={"head": 0.5}))
    controller = Controller(costs, AcceptanceModel({"head": [0.9] * 4}))
    outlooks = [
        controller.should_track("head", Budget(4, 4), 1, AcceptanceBucket.counts(0.0, 0, 64), unread)
        for unread in (0, 64, 4096)
    ]
    assert outlooks == [True, True, False]


def test_a_beginning_that_fails_does_not_end_drafting_for_what_follows():
    """Of outputs of 96 tokens the first 32 are never drafted right, the rest always, at over twice the speed."""
    controller = Controller(make_costs(row=0.5, draft=0.5), AcceptanceModel())
    lengths, emitted, seconds = dict.fromkeys("0123", 0), 0, 0.0
    for _ in range(4000):
        candidates = [
            Candidate(name, "head", Budget(4, 4), bucket=AcceptanceBucket.of(0.0, length))
            for name, length in lengths.items()
        ]
        controller.plan(tuple(lengths), len(lengths), candidates)
        depths = {
            candidate.request_id: controller.budget(candidate.request_id, candidate.allowed).depth
            for candidate in candidates
        }
        drafting = controller.costs.draft("head", len(candidates), max(depths.values()))
        step_seconds = controller.costs.verify(4, 4.0 + sum(depths.values())) + drafting
        for name, depth in depths.items():
            right = depth if lengths[name] >= AGES[-1] else 0
            controller.record_draft(name, "head", AcceptanceBucket.of(0.0, lengths[name]), chain(depth, right))
            lengths[name] += 1 + right
            emitted += 1 + right
            if lengths[name] >= 96:
                controller.forget(name)
                lengths[name] = 0
        controller.record_step(4, 4 + sum(depths.values()), drafting, step_seconds)
        seconds += step_seconds
    assert emitted / seconds > 1.25 * 4 / controller.costs.plain(4)


def test_who_comes_between_two_plans_is_judged_by_one_calculation(monkeypatch):
    controller, calls = Controller(make_costs(row=0.5, draft=0.5), AcceptanceModel({"head": [0.9] * 4})), []
    verify = controller.costs.verify
    monkeypatch.setattr(controller.costs, "verify", lambda *sizes: (calls.append(sizes), verify(*sizes))[1])
    ahead = AcceptanceBucket.counts(0.0, 64, 128)
    assert all(controller.should_track("head", Budget(4, 4), 4, ahead) for _ in range(9))
    assert len(calls) == 1
    for _ in range(300):
        controller.acceptance.record("a", "head", chain(4, 0), 0.0, LATE)
    for _ in range(20):
        controller.plan(("0",), 1, [])
    assert not controller.should_track("head", Budget(4, 4), 4, ahead)


def run(controller: Controller, steps: int, rate: float, batch: int = 4, depth: int = 4) -> tuple[float, float, int]:
    """Simulate a batch whose drafts are right at `rate`; return seconds, tokens per second and speculative steps."""
    rng, costs, seconds, tokens, drafting_steps = random.Random(1), controller.costs, 0.0, 0, 0
    for _ in range(steps):
        candidates = chains(batch, depth)
        controller.plan(tuple(candidate.request_id for candidate in candidates), batch, candidates)
        depths = {
            candidate.request_id: controller.budget(candidate.request_id, candidate.allowed).depth
            for candidate in candidates
        }
        rows, deepest = batch + sum(depths.values()), max(depths.values())
        drafting = costs.draft("head", batch, deepest)
        step_seconds = costs.verify(batch, float(rows)) + drafting
        for name, drafted in depths.items():
            right = next((place for place in range(drafted) if rng.random() > rate), drafted)
            controller.record_draft(name, "head", LATE, chain(drafted, right))
            tokens += 1 + right
        controller.record_step(batch, rows, drafting, step_seconds)
        seconds, drafting_steps = seconds + step_seconds, drafting_steps + (deepest > 0)
    return seconds, tokens / seconds, drafting_steps


def test_where_drafts_do_not_pay_probes_cost_a_bounded_share():
    controller = Controller(make_costs(row=4.0, draft=3.0), AcceptanceModel())
    run(controller, 100, rate=0.3)
    plain = controller.costs.verify(4, 4.0)
    seconds, speed, drafted = run(controller, 1000, rate=0.3)
    assert 0 < drafted < 100
    assert seconds <= 1000 * plain * (1 + 1.5 * PROBE_SHARE)
    assert speed >= (1 - 1.5 * PROBE_SHARE) * 4 / plain


def test_a_probe_of_who_is_not_followed_lasts_until_it_has_drafted():
    controller = Controller(make_costs(row=9.0, draft=9.0), AcceptanceModel())
    unfollowed = [item._replace(ready=False) for item in chains(2, 4)]

    def step(drafted: int) -> list[str]:
        """Run a step, with a verified draft of depth `drafted` unless 0; return the requests with a budget."""
        controller.plan(("0", "1"), 2, unfollowed)
        names = [name for name in ("0", "1") if controller.budget(name, Budget(4, 4)).nodes]
        assert names == [name for name in ("0", "1") if not controller.skips(name)]
        if names and drafted:
            controller.record_draft(names[0], "head", LATE, chain(drafted, 0))
        controller.record_step(2, 2 + drafted, 0.0, 12.0)
        return names

    probes = [(step(drafted=0), index) for index in range(20_000)]
    lasting = [len(list(group)) for names, group in itertools.groupby(probes, key=lambda item: item[0]) if names]
    assert len(lasting) > 2
    assert set(lasting[:-1]) == {TRACKING_STEPS}  # the last may be cut off
    assert {name for names, _ in probes for name in names} == {"0", "1"}
    while step(drafted=0):  # the rest of a probe in progress
        pass
    while not (first := step(drafted=0)):
        pass
    assert step(drafted=4) == first
    assert step(drafted=0) == []


def test_where_nobody_drafts_one_who_comes_changes_no_plan():
    controller, counts = Controller(make_costs(row=9.0, draft=9.0), AcceptanceModel()), []

    def plan(count: int) -> int:
        names = tuple(map(str, range(count)))
        counts.append(count)
        if due := controller.needs_candidates(names, count):
            counts.clear()
        controller.plan(names, count, chains(count, 4) if due else None)
        return len(counts)

    assert [plan(8), plan(9), plan(10), plan(8), plan(11), plan(9), plan(8)] == [0, 1, 2, 3, 0, 1, 0]


def test_it_finds_out_when_content_changes():
    controller = Controller(make_costs(row=0.5, draft=0.7), AcceptanceModel())
    run(controller, 400, rate=0.02)
    assert not controller.current.budgets
    _, _, drafted = run(controller, 600, rate=0.95)
    assert drafted > 300
    assert controller.current.budgets
    assert controller.acceptance.bias == pytest.approx(1.0, abs=0.15)


def test_budgets_stay_within_what_is_allowed_now():
    controller = Controller(make_costs(row=0.1, draft=0.1), with_rates([0.9]))
    controller.plan(("0",), 1, chains(1, 4))
    assert controller.budget("0", Budget(2, 2)) == Budget(2, 2)
    assert controller.budget("unknown", Budget(2, 2)) == NOTHING


def test_a_table_is_measured_once_and_a_damaged_one_anew(tmp_path):
    calls = []

    def make() -> CostTable:
        calls.append(1)
        return make_costs(1.0, 1.0).table

    first = kept_table(tmp_path, {"target": "a"}, make)
    assert kept_table(tmp_path, {"target": "a"}, make) == first
    assert len(calls) == 1
    kept_table(tmp_path, {"target": "b"}, make)
    assert len(calls) == 2
    for file in tmp_path.iterdir():
        file.write_text("{")
    assert kept_table(tmp_path, {"target": "a"}, make) == first
    assert len(calls) == 3


def test_a_draft_that_may_have_read_prompts_does_not_say_what_drafts_cost():
    controller = Controller(make_costs(row=0.1, draft=0.1), with_rates([0.9, 0.9]))
    controller.plan(("0", "1"), 2, chains(2, 4))
    expected = controller.costs.draft("head", 2, controller.current.depth)

    def corrected() -> bool:
        verify = float(controller.costs.verify(2, 10.0))
        controller.record_step(2, 10, 3 * expected, verify + 3 * expected)
        return controller.costs.draft("head", 2, controller.current.depth) != pytest.approx(expected)

    assert not corrected()
    controller.record_step(2, 2, 0.0, controller.costs.plain(2))  # the drafter still has to read the tokens this emits
    assert not corrected()
    assert corrected()


def test_a_machine_that_is_slow_for_a_step_teaches_nothing_of_its_drafts():
    controller = Controller(make_costs(row=0.1, draft=0.1), with_rates([0.9, 0.9]))
    controller.plan(("0", "1"), 2, chains(2, 4))
    depth, table = controller.current.depth, make_costs(row=0.1, draft=0.1)
    drafting, verify = table.draft("head", 2, depth), float(table.verify(2, 10.0))
    for slow in (1.0, 2.0, 0.5, 2.0, 2.0, 2.0):
        controller.record_step(2, 10, slow * drafting, slow * (verify + drafting))
    ratio = controller.costs.plain(2) / table.plain(2)
    assert ratio > 1.05
    assert controller.costs.draft("head", 2, depth) == pytest.approx(ratio * drafting, rel=0.1)


def test_a_round_whose_drafts_cannot_be_told_teaches_what_all_of_it_costs():
    controller = Controller(make_costs(row=0.1, draft=0.1), with_rates([0.9, 0.9]))
    controller.plan(("0", "1"), 2, chains(2, 4))
    table, depth = make_costs(row=0.1, draft=0.1), controller.current.depth
    rows = 2 * (1 + depth)
    assert depth > 1
    for _ in range(300):
        controller.record_step(2, rows, None, 3 * (table.verify(2, float(rows)) + table.draft("head", 2, depth)))
        controller.record_step(2, 2, None, 3 * table.plain(2))
    for cost in (
        lambda cost: cost.plain(2),
        lambda cost: cost.verify(2, float(rows)),
        lambda cost: cost.draft("head", 2, 3),
    ):
        assert cost(controller.costs) == pytest.approx(3 * cost(table), rel=0.02)


@given(
    sizes=st.lists(st.integers(1, 99), min_size=1, max_size=5, unique=True).map(sorted),
    queries=st.lists(st.floats(-10, 200), min_size=1, max_size=5),
)
def test_a_curve_answers_many_sizes_as_it_does_each(sizes, queries):
    curve = Curve(tuple(map(float, sizes)), tuple(float(size**2 % 17) for size in sizes))
    assert curve(np.array(queries)) == pytest.approx([curve(size) for size in queries])
