"""Profiling at start-up: known machines are measured as they are, busy ones are refused, and waits are bounded."""

from __future__ import annotations

import copy
import itertools
import json
import platform
import random
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from infer.batch.tree import Budget
from infer.config import ProposerConfig
from infer.console.card import describe_costs
from infer.engine import Engine
from infer.engine.startup.profiler import START_S, Stopwatch, Unmeasured, kept_table, measure
from infer.speculation.control.cost_model import CostModel, CostTable, Curve, contradiction
from tests.drafts import make_costs


class KnownMachine:
    """An engine with a simulated clock, whose steps take the time given by a formula."""

    FIXED, FIRST, FURTHER, LEVEL, PLAIN, READ, READS = (1e-3 * ms for ms in (10.0, 2.0, 1.0, 0.5, 0.25, 0.03, 0.01))

    overlap = None

    def __init__(self, holds: int) -> None:
        self.holds, self.now = holds, 0.0

    @contextmanager
    def decoding(self, prompts, params, check):
        check()
        room = self.holds
        self.now += self.READS * sum(map(len, prompts))
        requests = []
        for prompt in prompts:
            room -= len(prompt) + params.max_tokens
            if room >= 0:
                drafter = SimpleNamespace(kept=None)
                requests.append(SimpleNamespace(computed=len(prompt), tokens=prompt, drafter=drafter))
        self.requests = requests
        yield requests

    def step(self) -> None:
        self.verify(self.requests, 0)
        self.now += self.PLAIN

    def verify(self, requests, drafts: int) -> None:
        self.now += self.FIXED + len(requests) * (self.FIRST + self.FURTHER * drafts)

    def draft(self, requests, budget) -> None:
        self.now += budget.depth * self.LEVEL * len(requests)

    def prefill_drafter(self, requests) -> None:
        self.now += self.READ * sum(request.computed for request in requests)


class CapturedSteps:
    """Graphs of a simulated machine for up to two requests, in a quarter of the time that the host takes."""

    batches, reach = (1, 2), 10

    def __init__(self, machine: KnownMachine, longest: int) -> None:
        self.machine, self.longest = machine, longest

    def load(self, requests, states, limits, budgets) -> None:
        assert len(requests) <= 2
        self.requests, self.budget = requests, budgets[0]

    def launch(self) -> SimpleNamespace:
        begin = self.machine.now
        self.machine.verify(self.requests, self.budget.nodes)
        self.machine.draft(self.requests, self.budget)
        self.machine.now = begin + 0.25 * (self.machine.now - begin)
        return SimpleNamespace(read=lambda: None)


def with_graphs(*drafters: str, longest: int = 4096) -> KnownMachine:
    machine = KnownMachine(99999)
    graphs = dict.fromkeys(drafters, CapturedSteps(machine, longest))
    machine.overlap = SimpleNamespace(graphs_of=graphs.get)
    return machine


def profile(machine: KnownMachine, context: int = 4096, max_batch: int = 4) -> CostTable:
    sizes = {"vocab_size": 50, "context": context, "max_batch": max_batch, "max_rows": 99}
    return measure(machine, {"head": Budget(4, 4)}, clock=lambda: machine.now, **sizes)


@pytest.mark.parametrize("context", [4096, 80])
def test_a_known_machine_is_measured_as_it_is(context):
    machine = KnownMachine(99999)
    table = profile(machine, context=context)
    assert table.batches == (1, 2, 4)
    costs = CostModel(table)
    assert costs.plain(2) == pytest.approx(14.25e-3)
    assert costs.verify(4, 12) == pytest.approx(26.25e-3)
    assert costs.draft("head", 4, 3) == pytest.approx(6e-3)
    assert costs.read("head", 200) == pytest.approx(6e-3)
    assert costs.read("ngram", 200) == 0.0
    assert CostTable.from_json(json.loads(json.dumps(asdict(table)))) == table
    assert machine.now < START_S


def test_captured_steps_are_measured_by_their_graphs():
    """A graph is one of a whole step and takes as long whatever it drafts. Larger batches are not measured."""
    table = profile(with_graphs("none", "head"))
    assert table.batches == (1, 2)
    costs = CostModel(table)
    assert costs.plain(2) == costs.plain(4) == pytest.approx(0.25 * 14e-3)
    for rows, depth in ((4, 1), (10, 4)):
        assert costs.verify(2, rows) + costs.draft("head", 2, depth) == pytest.approx(0.25 * 26e-3)
    assert costs.read("head", 200) == pytest.approx(6e-3)


def test_a_drafter_without_graphs_is_measured_as_the_host_runs_it():
    assert profile(with_graphs("none")) == profile(KnownMachine(99999))


def test_a_context_that_graphs_do_not_reach_is_measured_as_the_host_runs_it():
    assert profile(with_graphs("none", "head", longest=80), context=80) == profile(KnownMachine(99999), context=80)


def test_batches_that_do_not_fit_into_the_cache_are_left_out():
    assert profile(KnownMachine(300)).batches == (1, 2)
    with pytest.raises(Unmeasured, match="no request of 64 tokens fits"):
        profile(KnownMachine(80))


def test_what_follows_a_large_work_is_timed_when_it_has_settled():
    """The work takes 1 ms, or 2 ms for a while after others."""
    now = 0.0

    def work() -> None:
        nonlocal now
        now += 1e-3 if now >= 6e-3 else 2e-3

    assert Stopwatch(lambda: now).time(work) == pytest.approx(1e-3)


def test_the_card_says_what_steps_and_drafts_cost():
    table = make_costs(row=0.001, draft=0.002, fixed=0.011).table
    step, drafting = describe_costs(table)
    assert step == ("step", "12.0 / 15.0 / 27.0 ms at 1 / 4 / 16 requests")
    assert drafting == ("drafting, head", "8.0 / 8.0 / 8.0 ms, 4 deep for all")
    assert describe_costs(None) == []
    assert describe_costs(replace(table, reads={"head": 3e-5}))[-1] == (
        "reading, head",
        "30 ms for 1000 tokens of a prompt",
    )


def test_a_table_is_measured_once_and_a_damaged_one_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    calls = []

    def make() -> CostTable:
        calls.append(1)
        return make_costs(1.0, 1.0).table

    first = kept_table({"target": "a"}, make)
    assert kept_table({"target": "a"}, make) == first
    assert len(calls) == 1
    kept_table({"target": "b"}, make)
    assert len(calls) == 2
    for file in tmp_path.iterdir():
        file.write_text("{")
    assert kept_table({"target": "a"}, make) == first
    assert len(calls) == 3


BATCHES = (1, 2, 4, 8, 16, 32, 64)
SANE = make_costs(row=1e-3, draft=2e-3, fixed=11e-3).table


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
        assert table.steps[0](size) == pytest.approx(quiet.steps[0](size), rel=0.01)


def test_a_work_whose_times_differ_is_measured_until_two_agree():
    now, seconds = 0.0, itertools.chain([0.9, 0.05, 0.09, 0.2, 0.4, 0.9], itertools.repeat(0.051))

    def work() -> None:
        nonlocal now
        now += next(seconds)

    assert Stopwatch(lambda: now).time(work) == pytest.approx(0.05)


def test_timings_of_which_no_two_agree_are_refused():
    now, seconds = 0.0, (0.02 * 1.3**turn for turn in itertools.count())

    def work() -> None:
        nonlocal now
        now += next(seconds)

    with pytest.raises(Unmeasured, match="not reproducible|takes longer"):
        Stopwatch(lambda: now).time(work)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": (Curve((1.0, 8.0), (0.154, 0.16)), *SANE.steps[1:])}, "1 rows took 154 ms"),
        ({"steps": (*SANE.steps[:2], Curve((16.0, 128.0), (0.9, 0.1)))}, "16 rows took 900 ms"),
        ({"drafts": {"head": (Curve((1.0, 4.0), (9e-3, 1e-3)),) * 3}}, "drafts of depth 1 took 9 ms"),
        ({"reads": {"head": float("nan")}}, "not finite"),
        ({"reads": {"head": -1.0}}, "negative"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused_and_not_read_again(tmp_path, monkeypatch, change, reason):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    wrong = replace(SANE, **change)
    assert reason in contradiction(wrong)
    kept_table({}, lambda: SANE)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({"table": asdict(wrong)}))
    assert kept_table({}, lambda: SANE) == SANE
    assert kept_table({}, lambda: pytest.fail("it was kept")) == SANE


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the switch is for x86")
def test_costs_of_one_level_of_processors_are_not_those_of_another(tiny_target, monkeypatch):
    """HEADWAY_CPU_LEVEL changes the kernels on the same machine."""
    keys = []

    def keep(key, make):
        keys.append(key)
        return SANE

    monkeypatch.setattr("infer.engine.startup.controller.kept_table", keep)
    for level in ("", "", "baseline"):
        monkeypatch.setenv("HEADWAY_CPU_LEVEL", level)
        drafts = ProposerConfig(name="ngram", adaptive=True)
        Engine(copy.deepcopy(tiny_target), proposer="ngram", proposer_config=drafts, probe=False)
    assert keys[0] == keys[1]
    assert [name for name in keys[0] if keys[0][name] != keys[2][name]] == ["device"]


def test_more_threads_may_make_more_rows_faster():
    """From 16 rows on, a step uses all threads."""
    curve = Curve((1.0, 2.0, 12.0, 16.0), (4e-3, 4.1e-3, 12e-3, 8e-3))
    assert contradiction(replace(SANE, steps=(curve, *SANE.steps[1:]))) == ""
    assert contradiction(SANE) == ""


def test_what_could_not_be_measured_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))

    def make() -> CostTable:
        raise Unmeasured("busy")

    for _ in range(2):
        with pytest.raises(Unmeasured):
            kept_table({}, make)
    assert list(tmp_path.iterdir()) == []
