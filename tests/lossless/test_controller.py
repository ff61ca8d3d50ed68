"""No plan of drafts, per request and step, changes a token; and the engine's controller, profiled in the test."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial

import pytest

from infer.batch.history import History
from infer.batch.tree import NOTHING, Budget, VerifiedDraft
from infer.config import ProposerConfig
from infer.engine.startup.profiled_engine import ProfiledEngine
from infer.request import DrafterState, SamplingParams
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.batch_plan import Candidate
from infer.speculation.control.confidence import Confidence, Prices
from infer.speculation.control.cost_model import CostModel, CostTable, Curve
from infer.speculation.control.planner import Controller, Planner
from infer.speculation.proposers.head import KEPT_ROWS, MIN_SEEN
from tests.drafts import chain
from tests.lossless.leftovers import assert_nothing_left
from tests.lossless.plain import GREEDY, SAMPLED, ids


class AtRandom(Planner):
    """Grants no drafts for stretches longer than KEPT_ROWS features, between them random budgets to random requests.
    `pays`: the probability that `should_track` returns True.
    """

    def __init__(self, seed: int, pays: float = 1.0) -> None:
        self.rng, self.quiet, self.pays = random.Random(seed), 0, pays
        self.longest = 0

    def should_track(self, candidate: Candidate, batch: int, tokens: int, unread: int = 0) -> bool:
        return self.rng.random() < self.pays

    def next_step(self, decoding) -> bool:
        self.quiet -= 1
        if self.quiet < -20:
            self.quiet = self.rng.choice([3, KEPT_ROWS + 9])
            self.longest = max(self.longest, self.quiet)
        return False

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        if self.quiet > 0 or self.rng.random() < 0.3:
            return NOTHING
        depth = self.rng.randint(1, allowed.depth) if allowed.depth else 0
        return Budget(min(allowed.nodes, self.rng.choice([depth, allowed.nodes])), depth) if depth else NOTHING


SHAPES = {
    "chain": {},
    "tree": {"tree": "beam:3x4:10"},
}


@pytest.mark.parametrize(
    ("proposer", "head", "shape", "params"),
    [
        ("head", None, "chain", SAMPLED),
        ("head", None, "tree", GREEDY),
        ("head", "eagle", "tree", SAMPLED),
        ("head", "p-eagle, one layer", "chain", GREEDY),
        ("head", "dspark", "chain", SAMPLED),
        ("combined", None, "chain", GREEDY),
    ],
)
def test_no_plan_changes_a_token(make_engine, prompts, proposer, head, shape, params):
    long = replace(params, max_tokens=150)
    engine = make_engine(proposer=proposer, head=head, shape=SHAPES[shape], max_batch=4)
    few = [*prompts[2:4], *prompts[5:7]]  # the last two are longer than KEPT_ROWS
    planned = []
    for pays in (1.0, 0.2):
        engine.speculator.planner = planner = AtRandom(seed=5, pays=pays)
        planned.append(ids(engine.generate(few, long)))
        assert planner.longest > KEPT_ROWS
        assert engine.stats.proposer_failures == 0
        assert engine.stats.speculation.drafted > 0
        assert_nothing_left(engine)
    engine.set_proposer("none")
    assert planned == [ids(engine.generate(few, long))] * 2


class AtAnyPrice(Planner):
    """Chains exit early by random prices, which change in every step."""

    def __init__(self, seed: int) -> None:
        self.rng, self.confidence = random.Random(seed), Confidence(AcceptanceModel())
        self.depths: set[int] = set()

    def next_step(self, decoding) -> bool:
        self.confidence.prices = Prices(*(self.rng.random() ** 3 for _ in range(3)))
        return False

    def record_draft(self, history: History, drafter: str, sampled: bool, draft: VerifiedDraft) -> None:
        self.confidence.update(history, sampled, draft.depth, len(draft.path))
        self.depths.add(draft.depth)


@pytest.mark.parametrize(
    ("head", "params"), [(None, GREEDY), ("eagle", SAMPLED), ("mlp", replace(SAMPLED, acceptance="block"))]
)
def test_no_price_changes_a_token(make_engine, prompts, head, params):
    engine = make_engine(proposer="head", head=head, max_batch=3)
    engine.speculator.planner = planner = AtAnyPrice(seed=2)
    engine._head.confidence = planner.confidence
    few = [*prompts[2:4], *prompts[5:7]]
    priced = ids(engine.generate(few, params))
    assert engine.stats.proposer_failures == 0
    engine._head.confidence = None
    assert priced == ids(engine.generate(few, params))
    if params.acceptance != "block":  # which has no early exit
        assert {1, 2, 3, 4} <= planner.depths
        assert planner.confidence.errors is not None
        engine.set_proposer("none")
        assert priced == ids(engine.generate(few, params))
    assert_nothing_left(engine)


class Switch(Planner):
    """Drafting pays for every request or for none, as `pays` says."""

    pays = False

    def budget(self, request_id: str, allowed: Budget) -> Budget:
        return allowed if self.pays else NOTHING

    def should_track(self, candidate: Candidate, batch: int, tokens: int, unread: int = 0) -> bool:
        return self.pays


@pytest.mark.parametrize(
    ("proposer", "head", "shape"),
    [
        ("head", None, "chain"),
        ("head", None, "tree"),
        ("head", "mtp", "tree"),
        ("head", "p-eagle, one layer", "chain"),
        ("head", "medusa", "tree"),
        ("draft_model", None, "chain"),
        ("draft_model", None, "tree"),
        ("combined", None, "chain"),
    ],
)
def test_a_drafter_follows_nobody_while_drafting_does_not_pay_and_all_once_it_does(
    make_engine, prompts, proposer, head, shape
):
    long = replace(GREEDY, max_tokens=150)
    few = [*prompts[2:4], *prompts[5:7]]
    draft_model = "same" if proposer == "draft_model" else None
    engine = make_engine(proposer=proposer, head=head, shape=SHAPES[shape], draft_model=draft_model, max_batch=4)
    engine.speculator.planner = switch = Switch()
    names = [engine.add(prompt, long) for prompt in few]
    requests = [engine.request(name) for name in names]
    for _ in range(40):
        engine.step()
    assert [request.drafter.state for request in requests] == [DrafterState.NONE] * 4
    assert sum(request.stats.drafted for request in requests) == 0
    switch.pays = True
    while engine.has_work:
        engine.step()
    assert [request.drafter.state for request in requests] == [DrafterState.PARTIAL] * 4
    assert all(request.stats.drafted > 0 for request in requests)
    assert sum(request.stats.accepted for request in requests) > 0
    assert engine.stats.proposer_failures == 0
    assert_nothing_left(engine)
    engine.set_proposer("none")
    assert [request.output_ids for request in requests] == ids(engine.generate(few, long))


def test_who_is_woken_is_drafted_for_once_its_drafter_has_seen_some_of_it(make_engine, prompts):
    engine = make_engine(proposer="head", shape=SHAPES["chain"])
    engine.speculator.planner = switch = Switch()
    request = engine.request(engine.add(prompts[2], replace(GREEDY, max_tokens=100)))
    for _ in range(20):
        engine.step()
    switch.pays, woken = True, len(request.tokens)
    while not request.stats.drafted:
        engine.step()
    seen = len(request.tokens) - woken
    assert MIN_SEEN <= seen <= MIN_SEEN + engine.config.page_size + 8  # a page must begin, and a step emits several
    assert request.drafter.state is DrafterState.PARTIAL


@pytest.mark.parametrize(("proposer", "shape"), [("head", "chain"), ("head", "tree"), ("combined", "chain")])
def test_probes_wake_one_request_and_let_go_of_it(make_engine, prompts, proposer, shape):
    long = replace(GREEDY, max_tokens=300)
    engine = make_engine(proposer=proposer, shape=SHAPES[shape], max_batch=4)
    curve = Curve((1.0, 2.0), (0.005, 0.01))
    costs = CostModel(CostTable((1, 4), (curve, curve), {proposer: (curve, curve)}))  # proportional to rows
    controller = Controller(costs, AcceptanceModel({proposer: [0.0]}), probe_share=0.3)
    record_step = controller.record_step  # with the made-up duration of a step, whatever this machine takes
    controller.record_step = lambda batch, rows, drafting, seconds: record_step(batch, rows, 0.0, 0.005 * rows)
    engine.speculator.planner = controller
    names = [engine.add(prompt, long) for prompt in prompts[2:5]]
    requests = [engine.request(name) for name in names]
    followed = []
    while engine.has_work:
        engine.step()
        followed.append(
            sum(request.drafter.state is not DrafterState.NONE for request in requests if request.finish_reason is None)
        )
        assert not controller.current.budgets
    assert {0, 1} <= set(followed) <= {0, 1, 2}  # a probed request is released a few steps later
    assert sum(request.stats.drafted > 0 for request in requests) > 1
    assert engine.stats.proposer_failures == 0
    assert_nothing_left(engine)
    engine.set_proposer("none")
    assert [request.output_ids for request in requests] == ids(engine.generate(prompts[2:5], long))


def test_few_are_not_drafted_for_while_many_are_about_to_join(make_engine, prompts):
    """During a burst of prompts the few that decode are candidates only if drafting would pay for the whole load."""
    engine = make_engine(proposer="head", max_batch=4, prefill_chunk=64, max_rows=64)
    counts = []

    class Watch(Switch):
        def next_step(self, decoding) -> bool:
            return True

        def plan(self, decoding, candidates) -> None:
            counts.append((len(decoding), len(candidates)))

    engine.speculator.planner = watch = Watch()
    for prompt in [prompts[4], prompts[7], prompts[8]]:  # the first decodes while the others are prefilled
        engine.add(prompt, replace(GREEDY, max_tokens=60))
    while engine.has_work:
        engine.step()
    early = [entry for entry in counts if 0 < entry[0] < 3]
    assert (1, 0) in early
    assert (3, 3) in counts
    watch.pays = True
    counts.clear()
    engine.generate([prompts[4], prompts[7], prompts[8]], replace(GREEDY, max_tokens=60))
    assert (1, 1) in counts


def test_pages_are_shared_by_what_fills_them(make_engine, prompts):
    """An untracked request begins with any cached pages, a tracked one with those that its drafter has filled."""
    prompt, short = prompts[6], replace(GREEDY, max_tokens=4)
    engine = make_engine(proposer="head", max_batch=4)
    engine.speculator.planner = switch = Switch()
    full = (len(prompt) - 1) // engine.config.page_size * engine.config.page_size
    assert full

    def cached() -> int:
        name = engine.add(prompt, short)
        request = engine.request(name)
        while request.finish_reason is None:
            engine.step()
        return request.cached

    assert [cached(), cached()] == [0, full]  # neither is tracked
    switch.pays = True
    assert [cached(), cached()] == [0, full]  # both are tracked
    engine._pool.pages.clear_cache()
    assert cached() == 0
    switch.pays = False
    assert cached() == full


class Ticking:
    """A timer that advances by `tick` at every reading: all that is timed takes equally long, on any machine."""

    def __init__(self, tick: float) -> None:
        self.tick, self.now = tick, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def test_the_engines_own_controller(make_engine, prompts, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    few = [prompt for prompt in prompts if len(prompt) < 100]
    timer = Ticking(1e-3)
    engine = make_engine(proposer="none", max_batch=8, timer=timer)
    plain = [ids(engine.generate(few, params)) for params in (GREEDY, SAMPLED)]

    before = engine.stats.prompt_tokens
    engine.set_proposer("head", config=ProposerConfig(name="auto", adaptive=True, max_draft_tokens=4))
    assert "measuring the cost of steps and drafts" in capfd.readouterr().err
    assert engine.stats.prompt_tokens == before
    assert_nothing_left(engine)
    controller = engine.speculator.planner
    costs, table = controller.costs, controller.costs.table
    assert table.batches == (1, 2, 4, 8)
    assert set(table.drafts) == {"head"}
    assert all(seconds > 0 for curve in (*table.steps, *table.drafts["head"]) for seconds in curve.seconds)
    assert table.steps[3].sizes[0] == 8.0
    assert 0 < table.reads["head"] < table.steps[0].seconds[0]
    assert engine._head.confidence is controller.confidence is not None
    assert [ids(engine.generate(few, params)) for params in (GREEDY, SAMPLED)] == plain

    flat = tuple(Curve(c.sizes, (0.2,) * len(c.sizes)) for c in table.steps)
    free = {"head": tuple(Curve(c.sizes, (0.0,) * len(c.sizes)) for c in table.drafts["head"])}
    controller.costs = CostModel(replace(table, steps=flat, drafts=free))  # drafting pays
    timer.tick = 0.1  # scoring a chain is a small part of such long steps
    for _ in range(100):
        controller.acceptance.record(History(), "head", chain(4, 4), 4.0)
    assert [ids(engine.generate(few, params)) for params in (GREEDY, SAMPLED)] == plain
    brier, by_history = engine.stats.forecast.errors
    assert 0 < brier < 1
    assert 0 < by_history < 1
    engine.set_proposer("none")
    assert engine._head.confidence is None
    engine.set_proposer("head")
    assert "measuring" not in capfd.readouterr().err
    assert engine.speculator.planner.costs is costs  # with the corrections learnt from steps
    assert engine.speculator.planner.acceptance is controller.acceptance
    assert engine._head.confidence is controller.confidence


def test_a_block_is_cut_where_its_confidence_says_that_a_row_does_not_pay(make_engine, prompts, tmp_path, monkeypatch):
    """A head that predicts its acceptance, on texts that it knows by heart and on others; levels cost nothing."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    params = replace(GREEDY, max_tokens=60)
    few = [prompt for prompt in prompts if len(prompt) < 100]
    few += [prompt[::-1] for prompt in few if len(prompt) > 10]
    engine = make_engine(proposer="none", head="dspark", max_batch=4, timer=Ticking(1e-3))
    plain, lengths, rates = ids(engine.generate(few, params)), [], []
    for row_s in (0.0, 0.02):
        engine.set_proposer("head", config=ProposerConfig(name="head", adaptive=True, max_draft_tokens=4))
        controller, table = engine.speculator.planner, engine.speculator.planner.costs.table
        steps = (Curve((0.0, 1.0), (0.2, 0.2 + row_s)),) * len(table.batches)
        drafts = {"head": (Curve((1.0, 2.0), (0.01, 0.01)),) * len(table.batches)}
        controller.costs = CostModel(replace(table, steps=steps, drafts=drafts, reads={}))
        made_up = partial(with_seconds, controller.record_step, 0.2, row_s)  # whatever this machine takes
        verified, record_draft = list[VerifiedDraft](), controller.record_draft
        controller.record_step = made_up
        controller.record_draft = lambda *parts, kept=verified, call=record_draft: (
            kept.append(parts[-1]),
            call(*parts),
        )
        for _ in range(3):
            assert ids(engine.generate(few, params)) == plain
        assert engine.stats.proposer_failures == 0
        by_confidence, by_history = engine.stats.forecast.errors
        assert by_confidence < by_history
        drafted = [draft.depth for draft in verified if draft.depth]
        rates.append(sum(len(draft.path) for draft in verified) / sum(drafted))
        lengths.append(drafted)
    free, priced = lengths
    assert sum(free) / len(free) > 3.5  # whole blocks, but at the end of a text
    assert set(priced) == {1, 2, 3, 4}
    assert sum(priced) / len(priced) < 3
    assert rates[1] > 1.1 * rates[0]  # what was left out would have been wrong
    assert engine.stats.forecast.bias == pytest.approx(1.0, abs=0.15)  # as many are accepted as expected


def with_seconds(record_step, step_s: float, row_s: float, batch: int, rows: int, drafting, seconds: float) -> None:
    """Record a step with made-up durations."""
    record_step(batch, rows, 0.01 if rows > batch else 0.0, step_s + row_s * rows + 0.01 * (rows > batch))


def test_a_machine_that_cannot_be_measured_begins_plain_and_learns(make_engine, prompts, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    few = prompts[-2:]  # which repeat themselves
    timer = Ticking(2.0)  # seconds per reading: too slow to profile at the start
    engine = make_engine(proposer="none", max_batch=2, timer=timer)
    plain = [ids(engine.generate(few, params)) for params in (GREEDY, SAMPLED)]
    engine.set_proposer("ngram", config=ProposerConfig(name="auto", adaptive=True, max_draft_tokens=4))
    assert re.search(r"costs not measured \(.*\): no drafts until trial steps have shown", capfd.readouterr().err)
    assert list(tmp_path.rglob("costs-*")) == []
    assert not engine.profile_due  # it was attempted
    costs = engine.speculator.planner.costs
    assert costs.guessed
    assert engine.costs is None
    assert ids(engine.generate(few, replace(GREEDY, max_tokens=4))) == [token_ids[:4] for token_ids in plain[0]]
    assert engine.stats.speculation.drafted == 0

    for _ in range(40):
        assert [ids(engine.generate(few, params)) for params in (GREEDY, SAMPLED)] == plain
        if not costs.guessed:
            break
    else:
        pytest.fail("drafts on trial have taught nothing")
    assert engine.stats.speculation.drafted > 0
    assert costs.plain(1) > timer.tick  # a guessed step takes one second
    assert engine.costs is None, "the table is still a guess, which corrections make useful"
    assert [ids(engine.generate(few, params)) for params in (GREEDY, SAMPLED)] == plain
    assert_nothing_left(engine)


class Called(Exception):
    """A request arrives while step costs are profiled."""


def test_what_steps_cost_can_be_measured_after_the_start(make_engine, prompts, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    few, adaptive = prompts[4:6], {"adaptive": True}
    plain = [ids(make_engine(proposer="none").generate(few, params)) for params in (GREEDY, SAMPLED)]
    engine = make_engine(shape=adaptive, max_batch=2, timer=Ticking(1e-3), profile=False)
    assert engine.profile_due
    assert engine.speculator.planner.costs.guessed
    assert [ids(engine.generate(few, params)) for params in (GREEDY, SAMPLED)] == plain

    before, stats, calls = engine.speculator.planner, engine.stats.generation_tokens, 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise Called

    with pytest.raises(Called):
        engine.profile(check)
    assert engine.profile_due
    assert engine.speculator.planner is before
    assert engine._head.confidence is before.confidence is not None
    assert engine.stats.generation_tokens == stats
    assert_nothing_left(engine)
    assert [ids(engine.generate(few, params)) for params in (GREEDY, SAMPLED)] == plain

    engine.profile()
    assert not engine.profile_due
    assert engine.costs.batches == (1, 2)
    assert engine.speculator.planner.acceptance is before.acceptance
    assert [ids(engine.generate(few, params)) for params in (GREEDY, SAMPLED)] == plain
    later = make_engine(shape=adaptive, max_batch=2, timer=Ticking(1e-3), profile=False)
    assert not later.profile_due  # the table was cached
    assert later.costs == engine.costs
    assert "measure" not in capfd.readouterr().err


def test_reading_again_fills_a_drafters_layers(make_engine, prompts):
    """`prefill_drafter`, which is timed, makes the drafter fill its layers for the whole prompt."""
    engine = make_engine(proposer="head")
    profiled = ProfiledEngine(engine)
    with profiled.decoding([prompts[5]], replace(GREEDY, max_tokens=8)) as (request,):
        caches = engine._pool.layers.caches[engine._head.first_layer :]
        for cache in caches:
            cache.zero_()
        profiled.prefill_drafter([request])
        size = engine.config.page_size
        places = range(1, request.computed + 1)
        slots = [request.pages[place // size] * size + place % size for place in places]
        assert len(slots) >= len(prompts[5])
        assert all(bool((cache[:, :, slots] != 0).any(-1).all()) for cache in caches)
    assert_nothing_left(engine)


def test_a_context_too_short_to_measure_in(make_small_engine, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    engine = make_small_engine()
    engine.context = 8
    engine.set_proposer("head", config=ProposerConfig(name="auto", adaptive=True, max_draft_tokens=4))
    reason = "drafts of 4 tokens leave nothing of a context of 8"
    assert f"costs not measured ({reason}): no drafts until trial steps have shown" in capfd.readouterr().err
    assert engine.costs is None


def test_requests_that_ask_for_less_are_planned_within_it(make_engine, prompts):
    engine = make_engine(proposer="head", max_batch=4)
    engine.speculator.planner = AtRandom(seed=1)
    params = SamplingParams(max_tokens=30, ignore_eos=True, max_draft_tokens=1)
    for completion in engine.generate(prompts[:3], params):
        assert 0 < completion.stats.drafted <= completion.stats.steps
