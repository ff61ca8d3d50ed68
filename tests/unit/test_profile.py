"""Profiling at start-up on a busy or slow machine: timings are repeated, bad ones not stored, the wait is bounded."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from infer.speculation.budget import Budget
from infer.speculation.control.acceptance_model import LATE, AcceptanceModel
from infer.speculation.control.cost_model import MAX_DOUBTED, CostModel, CostTable, Curve, contradiction
from infer.speculation.control.planner import Controller
from infer.speculation.control.profiler import BATCHES, START_S, Stopwatch, Unmeasured, Work, kept_table
from infer.speculation.control.trials import TRIAL_SHARE, TRIALS, guessed_cost_model
from tests.drafts import chain
from tests.unit.test_controller import KnownMachine, chains, make_costs, profile

SANE = make_costs(row=1e-3, draft=2e-3, fixed=10e-3, around=1e-3).table


def slower(machine: KnownMachine, times: float) -> KnownMachine:
    for name in ("FIXED", "FIRST", "FURTHER", "LEVEL", "PLAIN", "READ", "READS"):
        setattr(machine, name, times * getattr(machine, name))
    return machine


def test_an_idle_machine_is_measured_for_all_batch_sizes_within_the_bound():
    machine = slower(KnownMachine(10**6), 0.05)
    table = profile(machine, context=512, max_batch=64)
    assert table.batches == BATCHES
    assert machine.now < START_S


def test_a_slower_machine_is_measured_for_the_batch_sizes_that_there_is_time_for():
    machine = slower(KnownMachine(10**6), 4.0)
    table = profile(machine, max_batch=64)
    assert table.batches in {BATCHES[:count] for count in range(1, len(BATCHES))}
    assert machine.now < START_S
    assert CostModel(table).plain(1) == pytest.approx(4 * (10 + 2 + 0.25) * 1e-3)


@pytest.mark.parametrize("times", [40.0, 1000.0])
def test_a_start_does_not_wait_for_a_machine_that_is_too_slow(times):
    machine = slower(KnownMachine(10**6), times)
    with pytest.raises(Unmeasured):
        profile(machine, max_batch=64)
    step = machine.FIXED + 64 * machine.FIRST
    assert machine.now < START_S + 4 * step  # the work that was running at the time limit


class Disturbed(KnownMachine):
    """Another process delays a `share` of the verifies by random times."""

    def __init__(self, holds: int, share: float) -> None:
        super().__init__(holds)
        self.rng, self.share = random.Random(3), share

    def verify(self, requests, drafts: int) -> None:
        super().verify(requests, drafts)
        if self.rng.random() < self.share:
            self.now += self.rng.uniform(0.01, 0.4)


def test_a_profile_of_a_machine_that_is_always_disturbed_is_refused_in_time():
    machine = Disturbed(10**6, share=1.0)
    with pytest.raises(Unmeasured):
        profile(machine)
    assert machine.now < START_S + 1.0


def test_a_disturbance_now_and_then_is_measured_around():
    table, quiet = (profile(machine, max_batch=1) for machine in (Disturbed(10**6, 0.2), KnownMachine(10**6)))
    for size in (1.0, 5.0):
        assert table.verify[0](size) == pytest.approx(quiet.verify[0](size), rel=0.01)


def test_a_work_whose_times_differ_is_measured_until_two_agree():
    now, seconds = 0.0, itertools.chain([9.0, 0.05, 0.09, 0.2, 0.4, 0.9], itertools.repeat(0.051))

    def work() -> None:
        nonlocal now
        now += next(seconds)

    assert Stopwatch(lambda: now, 60.0).timed([Work(work, again=False)], 0.0) == pytest.approx((0.05,))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"verify": (Curve((1.0, 8.0), (0.154, 0.16)), *SANE.verify[1:])}, "1 rows took 154 ms"),
        ({"verify": (*SANE.verify[:2], Curve((16.0, 128.0), (0.9, 0.1)))}, "16 rows took 900 ms"),
        ({"drafts": {"head": (Curve((1.0, 4.0), (9e-3, 1e-3)),) * 3}}, "drafts of depth 1 took 9 ms"),
        ({"around": (0.0, float("nan"), 0.0)}, "not finite"),
        ({"reads": {"head": -1.0}}, "negative"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused_and_not_read_again(tmp_path, change, reason):
    wrong = replace(SANE, **change)
    assert reason in contradiction(wrong)
    kept_table(tmp_path, {}, lambda: SANE)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({"table": wrong.to_json()}))
    assert kept_table(tmp_path, {}, lambda: SANE) == SANE
    assert kept_table(tmp_path, {}, lambda: pytest.fail("it was kept")) == SANE


def test_more_threads_may_make_more_rows_faster():
    """From 16 rows on, a step uses all threads."""
    curve = Curve((1.0, 2.0, 12.0, 16.0), (4e-3, 4.1e-3, 12e-3, 7e-3))
    assert contradiction(replace(SANE, verify=(curve, *SANE.verify[1:]))) == ""
    assert contradiction(SANE) == ""


def test_what_could_not_be_measured_is_not_kept(tmp_path):
    def make() -> CostTable:
        raise Unmeasured("busy")

    for _ in range(2):
        with pytest.raises(Unmeasured):
            kept_table(tmp_path, {}, make)
    assert list(tmp_path.iterdir()) == []


def decode(controller: Controller, machine: CostModel, steps: int, rate: float, batch: int = 2) -> list[int]:
    """Simulate decoding with the step times of `machine`; return the drafted depth of each step."""
    rng, depths = random.Random(1), list[int]()
    for _ in range(steps):
        candidates = chains(batch, 4)
        controller.plan(tuple(candidate.request_id for candidate in candidates), batch, candidates)
        drafted = {
            candidate.request_id: controller.budget(candidate.request_id, candidate.allowed).depth
            for candidate in candidates
        }
        for name, depth in drafted.items():
            right = next((place for place in range(depth) if rng.random() > rate), depth)
            controller.record_draft(name, "head", LATE, chain(depth, right))
        count, rows = sum(depth > 0 for depth in drafted.values()), batch + sum(drafted.values())
        drafting = machine.draft("head", count, max(drafted.values()))
        controller.record_step(batch, rows, drafting, machine.verify(batch, float(rows)) + drafting)
        depths.append(max(drafted.values()))
    return depths


@pytest.mark.parametrize(("row", "draft", "pays"), [(0.3e-3, 0.5e-3, True), (9e-3, 40e-3, False)])
@pytest.mark.parametrize("slow", [0.1, 1.0, 50.0])
def test_without_a_profile_it_begins_plain_and_learns_what_drafts_cost(row, draft, pays, slow):
    machine = make_costs(slow * row, slow * draft, fixed=slow * 10e-3, around=slow * 1e-3)
    controller = Controller(guessed_cost_model({"head": Budget(4, 4)}), AcceptanceModel({"head": [0.9] * 4}))
    assert controller.costs.guessed
    first = decode(controller, machine, 10, rate=0.9)
    assert set(first) == {0}
    while controller.costs.guessed:
        first += decode(controller, machine, 1, rate=0.9)
        assert len(first) < 20_000
    assert sum(depth > 0 for depth in first) <= 2 * TRIALS
    assert controller.costs.plain(2) == pytest.approx(machine.plain(2), rel=0.1)
    last = decode(controller, machine, 600, rate=0.9)[100:]
    assert (sum(depth > 0 for depth in last) > 400) == pays
    if pays:
        rows = float(2 + 2 * max(last))
        assert controller.costs.verify(2, rows) == pytest.approx(machine.verify(2, rows), rel=0.2)


def test_trials_take_a_bounded_share_of_the_time():
    machine = make_costs(row=9e-3, draft=4e-3, fixed=10e-3, around=1e-3)
    controller = Controller(guessed_cost_model({"head": Budget(4, 4)}), AcceptanceModel({"head": [0.9] * 4}))
    steps = 0
    lost = total = 0.0
    while controller.costs.guessed:
        depth = decode(controller, machine, 1, rate=0.0)[0]
        steps += 1
        assert steps < 20_000
        step_seconds = machine.verify(2, float(2 + depth)) + machine.draft("head", 1, depth)
        total, lost = total + step_seconds, lost + step_seconds - machine.plain(2)
    assert lost < 3 * TRIAL_SHARE * total


def test_a_table_that_every_step_denies_is_given_up():
    """The table, measured in a busy hour, says 154 ms; steps take 4 ms."""
    costs = CostModel(replace(SANE, verify=(Curve((1.0, 8.0), (0.154, 0.16)), *SANE.verify[1:])))
    for _ in range(MAX_DOUBTED - 1):
        costs.learn(batch=1, rows=1, seconds=4e-3)
    assert costs.plain(1) == pytest.approx(0.155)
    costs.learn(batch=1, rows=1, seconds=4e-3)
    assert costs.plain(1) == pytest.approx(4e-3)
