"""The controller on simulated machines: what users are promised, whatever the controller does to keep it."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from infer.batch.tree import Budget
from infer.request import DrafterState
from tests.judge_controller import LONG
from tests.simulated_machine import (
    CHAIN,
    CHAT,
    CHAT1,
    CODE,
    DEMO,
    GOOD,
    GPU,
    MIXED,
    SMOLLM2,
    TREE,
    USELESS,
    WIDE,
    Simulation,
    controlled,
    references,
)

TOKENS = {1: 3000, 4: 4000, 16: 5000, 64: 8000}  # by number of requests


@pytest.mark.parametrize(
    ("machine", "content", "batch", "options"),
    [
        (SMOLLM2, CODE, 1, {}),
        (SMOLLM2, CHAT, 4, {}),
        (SMOLLM2, USELESS, 16, {}),
        (WIDE, GOOD, 1, {}),
        (WIDE, USELESS, 4, {}),
        (WIDE, CHAT, 16, {}),
        (DEMO, CODE, 4, {}),
        (GPU, CHAT1, 1, {}),
        (GPU, CODE, 16, {}),
        (GPU, MIXED, 4, {}),
        (SMOLLM2, CODE, 64, {}),
        (WIDE, CODE, 1, {"slow": 1.8}),  # profiled in a slow hour
        (SMOLLM2, CHAT, 1, {"profiled": replace(SMOLLM2, row=0.5)}),  # rows cost twice what was profiled
        (replace(WIDE, beside=3.0), CHAT, 1, {}),  # drafts disturb the target
        (replace(WIDE, context=3.0), CODE, 4, LONG),  # long contexts make rows dear
        (WIDE, CHAT, 4, {"scored": True}),
        (WIDE, CODE, 1, {"limit": TREE}),
        (GPU, GOOD, 4, {"limit": TREE}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_never_slower_than_plain_and_about_as_fast_as_the_best_fixed_plan(machine, content, batch, options):
    same = {key: value for key, value in options.items() if key in ("limit", "prompt", "output")}
    plain, best = references(machine, content, batch, TOKENS[batch], **same)
    speed = controlled(machine, content, batch, **options).run(TOKENS[batch]).speed
    assert speed >= 0.98 * plain
    assert speed >= 0.95 * best


def test_steps_whose_drafting_cannot_be_told_apart_are_learnt_from_too():
    """As rounds in flight are; the profile is of a fast hour."""
    shares = []
    for seed in range(3):
        simulation = controlled(WIDE, CODE, 4, slow=0.5, seed=seed)
        simulation.split = False
        shares.append(simulation.run(4000).speed / references(WIDE, CODE, 4, 4000, seed=seed)[1])
    assert statistics.fmean(shares) >= 0.95


def test_one_cold_plain_step_does_not_make_drafts_look_good():
    """The profile of plain steps is of a slow moment, and the first one confirms it."""
    simulation = controlled(SMOLLM2, CHAT, 4, profiled=replace(SMOLLM2, step=9.0, row=0.7))
    simulation.speed_of = lambda now: 1.2 if simulation.seen.steps == 1 else 1.0
    assert simulation.run(1500).drafted < 0.2


@pytest.mark.parametrize(("machine", "batch"), [(SMOLLM2, 1), (SMOLLM2, 4), (WIDE, 1), (GPU, 4)])
def test_where_drafts_do_not_pay_probes_cost_half_a_percent(machine, batch):
    machine = replace(machine, noise=0.0)
    plain = references(machine, USELESS, batch, 4000, limit=Budget(1, 1))[0]
    simulation = controlled(machine, USELESS, batch)
    simulation.run(4000)
    seen = simulation.run(8000)
    assert seen.speed >= 0.985 * plain  # 0.5 % of probes; other outputs, another phase of the machine's drift
    assert 0 < seen.drafted < 0.15


def test_plain_steps_are_probed_while_drafts_pay():
    """They become three times as fast, which no step with drafts shows."""

    class Faster(type(GPU)):
        def verify(self, batch, rows, context=0.0):
            return super().verify(batch, rows, context) / (3 if rows == batch else 1)

    simulation = controlled(GPU, CODE, 1)
    assert simulation.run(1000).drafted > 0.9
    simulation.machine = Faster(**vars(GPU))
    simulation.run(4000)
    assert simulation.run(2000).drafted < 0.2


@pytest.mark.parametrize(("few", "many"), [(1, 16), (1, 64)])
def test_it_adapts_to_load(few, many):
    """On SmolLM2 good drafts pay for one request and for few others."""
    simulation = controlled(SMOLLM2, GOOD, few, sizes=[1, 2, 4, 8, 16])
    assert simulation.run(1000).drafted > 0.8
    simulation.batch = many
    simulation.run(10 * many)
    assert simulation.run(100 * many).drafted < 0.1
    simulation.batch = few
    simulation.run(100 * few + 88 * many)  # until the others have ended
    assert simulation.run(1000).drafted > 0.8


def test_it_adapts_to_content():
    simulation = controlled(SMOLLM2, USELESS, 1)
    simulation.run(3000)
    assert simulation.run(1000).drafted < 0.2
    simulation.content = GOOD
    simulation.run(1500)
    assert simulation.run(1000).drafted > 0.8
    simulation.content = USELESS
    simulation.run(1500)
    assert simulation.run(1000).drafted < 0.2


@pytest.mark.parametrize("times", [0.4, 2.5])
def test_it_survives_a_machine_that_changes_its_speed(times):
    for content, drafts in ((CODE, True), (USELESS, False)):
        simulation = controlled(WIDE, content, 4)
        simulation.run(2000)
        simulation.speed_of = lambda now: times
        simulation.run(500)
        assert (simulation.run(2000).drafted > 0.8) == drafts


def test_it_notices_that_rows_became_dear_and_cheap_again():
    simulation = controlled(WIDE, CODE, 1)
    assert simulation.run(1000).drafted > 0.8
    simulation.machine = replace(WIDE, row=60.0)
    simulation.run(500)
    assert simulation.run(1000).drafted < 0.2
    simulation.machine = WIDE
    simulation.run(8000)
    assert simulation.run(1000).drafted > 0.8


@pytest.mark.parametrize(("machine", "content"), [(WIDE, CODE), (SMOLLM2, USELESS), (GPU, GOOD)])
def test_without_a_profile_it_begins_plain_and_learns_what_drafts_cost(machine, content):
    simulation = controlled(machine, content, 1, guess=True)
    for _ in range(12):
        simulation.step()
    assert simulation.seen.drafted == 0
    simulation.run(3000)
    seen = simulation.run(3000)
    plain, best = references(machine, content, 1, 3000)
    assert seen.speed >= max(0.98 * plain, 0.9 * best)


def test_each_request_drafts_as_far_as_its_own_drafts_are_right():
    simulation = controlled(WIDE, MIXED, 4, output=(400, 400))
    simulation.run(1000)  # of outputs of 400 tokens each
    poor, good = list[int](), list[int]()
    for _ in range(30):
        decoding = list(simulation.running)
        simulation.step()
        for request, rows in zip(decoding, simulation.seen.rows[-1], strict=True):
            rate = simulation.rates[request.request_id]
            (poor if rate < 0.3 else good if rate > 0.8 else []).append(rows - 1)
    assert 2 * statistics.fmean(poor) < statistics.fmean(good)


def test_of_a_tree_as_many_nodes_are_drafted_as_pay():
    nodes = []
    for row in (0.05, 1.0, 3.0, 30.0):
        simulation = controlled(replace(WIDE, row=row), CODE, 1, limit=TREE)
        simulation.run(1500)
        rows = simulation.run(1500).rows
        nodes.append(sum(map(sum, rows)) / len(rows) - 1)
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > 8 > nodes[1] > nodes[3]
    assert nodes[3] < 0.5


def test_drafters_are_released_where_they_do_not_pay_and_started_again_where_they_do():
    simulation = controlled(WIDE, USELESS, 4, output=(400, 400))

    def states() -> set[DrafterState]:
        return {request.drafter.state for request in simulation.running}

    simulation.run(1500)
    states_seen = set[DrafterState]()
    for _ in range(20):
        simulation.step()
        states_seen |= states()
    assert DrafterState.NONE in states_seen
    assert DrafterState.FULL not in states_seen
    simulation.content = GOOD
    simulation.rates = dict.fromkeys(simulation.rates, 0.8)
    for _ in range(1500):
        simulation.step()
        states_seen |= states()
    assert DrafterState.PARTIAL in states_seen
    assert simulation.run(500).drafted > 0.8


def test_early_exit_saves_rows_of_unlikely_tokens_on_slow_steps_only():
    speeds = [controlled(WIDE, CODE, 1, scored=scored).run(4000).speed for scored in (True, False)]
    assert speeds[0] > speeds[1]
    for machine, scores in ((WIDE, True), (replace(WIDE, step=1.0, row=0.05, first=0.05, level=0.05), False)):
        simulation = controlled(machine, GOOD, 1, scored=True)
        simulation.run(200)
        assert simulation.confidence is not None
        assert (simulation.confidence.prices is not None) == scores


def test_a_burst_of_prompts_is_not_drafted_for_on_behalf_of_the_few_that_decode():
    """One request decodes when fifteen more are admitted with it; drafts pay for one and not for sixteen."""
    simulation = controlled(SMOLLM2, GOOD, 16)
    simulation.run(3000)
    assert simulation.seen.drafted < 0.1
    assert {request.drafter.state for request in simulation.running} <= {DrafterState.NONE, DrafterState.PARTIAL}


def test_stalls_of_the_machine_end_no_drafts():
    simulation, rng = controlled(WIDE, CODE, 1), random.Random(0)
    simulation.speed_of = lambda now: 30.0 if rng.random() < 0.02 else 1.0
    simulation.run(500)
    assert simulation.run(2000).drafted > 0.85


def test_slow_first_steps_with_drafts_do_not_end_drafting():
    """Those after plain ones take three times as long here, later ones do not."""
    simulation = controlled(replace(SMOLLM2, after_plain=2.0), GOOD, 1)
    simulation.run(200)
    assert simulation.run(2000).drafted > 0.8


def test_drafts_that_never_last_until_they_settle_are_judged_by_their_first_steps():
    """Responses of a few tokens, and a load that changes all the time: drafts pay for one request only."""

    def speed(simulation: Simulation) -> float:
        rng, tokens, seconds = random.Random(7), 0, 0.0
        for _ in range(400):
            simulation.batch = rng.choice([1, 1, 2, 3, 4])
            seen = simulation.run(12)
            tokens, seconds = tokens + seen.tokens, seconds + seen.seconds
        return tokens / seconds

    plain = speed(Simulation(SMOLLM2, GOOD, 1, default="none", output=(3, 6)))
    assert speed(controlled(SMOLLM2, GOOD, 1, sizes=[1, 2, 4], output=(3, 6))) >= 0.98 * plain


def test_budgets_stay_within_what_a_request_allows():
    simulation = controlled(GPU, GOOD, 4)
    simulation.run(4000)
    for request in simulation.running:
        assert request.drafter.budget(request).depth <= request.remaining - 1
    planner = simulation.speculator.planner
    budgets = [planner.budget(request.request_id, Budget(1, 1)) for request in simulation.running]
    assert Budget(1, 1) in budgets
    assert planner.budget("unknown", CHAIN) == Budget(0, 0)
    forecast = planner.forecast
    assert forecast is not None
    assert forecast.depth > 0
    assert forecast.speedup > 1.1
    assert forecast.bias == pytest.approx(1.0, abs=0.15)
