"""Overlap scheduling changes no token, whichever requests arrive, finish or are aborted with a round in flight.

On a CPU a round runs when it is launched, which is before the host has read the previous one.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch

from infer.batch.grammar import Grammar
from infer.graphs.step_graph import Launched, StepGraphs
from infer.request import SamplingParams
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.cost_model import CostModel, CostTable, Curve
from infer.speculation.control.planner import Controller, Planner
from tests.lossless import plain, test_lives
from tests.lossless.plain import answer_all, ids
from tests.lossless.random_requests import random_params
from tests.lossless.test_controller import AtAnyPrice, Switch
from tests.pairwise import parametrize_each
from tests.pools import check_pool

EAGLE3 = "eagle3, whole vocabulary"
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=3)
CUT = replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.01)
PROMPTS = [[5, 6, 7], [9] * 17, list(range(10, 50)), [8], [5, 6, 7] * 4]
PARAMS = [GREEDY, SAMPLED, CUT, replace(GREEDY, max_tokens=7), replace(SAMPLED, max_tokens=33)]
AHEAD = {"graphs": "on", "threads": 1}


@pytest.fixture
def rounds(monkeypatch):
    """Count the rounds launched and read, and as "late" those read after the next one had been launched."""
    counts: Counter[str] = Counter()
    launch, read = StepGraphs.launch, Launched.read

    def counted_launch(self):
        counts["launched"] += 1
        return launch(self)

    def counted_read(self):
        counts["read"] += 1
        counts["late"] += counts["launched"] > counts["read"]
        return read(self)

    monkeypatch.setattr(StepGraphs, "launch", counted_launch)
    monkeypatch.setattr(Launched, "read", counted_read)
    return counts


@pytest.mark.parametrize(
    ("dtype", "proposer", "head"),
    [
        *(
            (dtype, *drafts)
            for dtype in (torch.float32, torch.bfloat16)
            for drafts in (("none", EAGLE3), ("head", EAGLE3))
        ),
        *((torch.float32, "head", head) for head in ("eagle", "p-eagle, one layer")),
        *((torch.bfloat16, "head", head) for head in ("mlp", "dspark")),
    ],
)
def test_rounds_ahead_change_nothing(make_small_engine, rounds, dtype, proposer, head):
    """With overlap the token ids, the drafted and the accepted tokens are the same as without it."""
    engine = make_small_engine(dtype, proposer, head=head, max_batch=6, **AHEAD)
    ahead = [(completion.token_ids, completion.stats) for completion in engine.generate(PROMPTS, PARAMS)]
    assert rounds["late"] > 10
    assert rounds["launched"] == rounds["read"]
    check_pool(engine._pool, [])
    engine.config.graphs = "off"
    engine.set_proposer(proposer)
    rounds.clear()
    assert [(completion.token_ids, completion.stats) for completion in engine.generate(PROMPTS, PARAMS)] == ahead
    assert not rounds


@parametrize_each(
    {
        "head": [EAGLE3, EAGLE3, "mlp", "medusa", "p-eagle, one layer", "dflash"],
        "shape": [None, {"tree": "beam:3x4:10"}],
    }
)
def test_each_request_has_its_own_budget(make_small_engine, rounds, head, shape):
    """Drafts of several lengths, and none for one request, in one round."""
    params = [replace(item, max_draft_tokens=depth) for item, depth in zip(PARAMS, (None, 1, 2, None, 3), strict=True)]
    params[0] = replace(params[0], speculate=False)
    results = []
    for graphs in ("on", "off"):
        engine = make_small_engine(proposer="head", head=head, shape=shape, max_batch=6, **AHEAD | {"graphs": graphs})
        completions = engine.generate(PROMPTS, params)
        drafted = [0 if shape else item.stats.drafted for item in completions]  # the last trees are larger in rounds
        results.append([(item.token_ids, item.stats.accepted_by_position) for item in completions] + drafted)
        assert (rounds["late"] > 10) == (graphs == "on")
        rounds.clear()
        check_pool(engine._pool, [])
    assert results[0] == results[1]
    assert len({len(item.stats.drafted_by_position) for item in completions}) > 3


class Changing(Planner):
    """Grants every request another budget in every step."""

    def __init__(self) -> None:
        self.rng, self.depths = random.Random(3), dict[str, int]()

    def next_step(self, decoding) -> bool:
        self.depths = {name: self.rng.randrange(4) for name in decoding}
        return False

    def budget(self, request_id, allowed):
        return allowed.within(self.depths.get(request_id, 0))


def test_budgets_change_between_rounds(make_small_engine, make_plain, rounds, monkeypatch):
    engine, loads, load = make_small_engine(proposer="head", max_batch=6, **AHEAD), [], StepGraphs.load
    monkeypatch.setattr(StepGraphs, "load", lambda self, *args: (loads.append(self), load(self, *args))[1])
    engine.speculator.planner = Changing()
    drafts = record_verified(engine)
    params = [replace(item, max_tokens=40) for item in PARAMS]
    plain = make_plain(small=True)
    assert ids(engine.generate(PROMPTS, params)) == [
        plain(*item).token_ids for item in zip(PROMPTS, params, strict=True)
    ]
    assert rounds["late"] > 20
    assert len(loads) < 10  # rounds go on while budgets change
    assert all(len({nodes for nodes, *_ in of_request}) > 2 for of_request in drafts.values())
    check_pool(engine._pool, [])


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ("eagle", None),
        ("mlp", None),
        ("eagle3", {"tree": "beam:3x4:12"}),
        ("medusa", {"tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}),
    ],
)
def test_drafts_that_are_often_right(make_engine, expected, prompts, rounds, head, shape):
    """`verified` receives the drafts of ordinary steps, except for the last ones, which rounds draft to full depth."""
    engine, reports = make_engine(head=head, shape=shape, max_batch=4, **AHEAD), []
    for ahead in (1, 0):
        engine.config.graphs = "on" if ahead else "off"
        engine.set_proposer("head")
        reports.append(record_verified(engine))
        for params in (plain.GREEDY, plain.SAMPLED):
            completions = engine.generate(prompts[2:5], params)
            assert ids(completions) == expected[torch.float32, params][2:5]
        assert (rounds["late"] > 10) == ahead
        rounds.clear()
    assert engine.stats.speculation.accepted > 100
    assert reports[0] == reports[1]
    assert max(len(path) for drafts in reports[0].values() for *_, path in drafts) > 2


def record_verified(engine):
    """Record the drafts that are passed to `verified` from now on, by prompt and temperature."""
    drafts, verified = defaultdict(list), engine.speculator.verified

    def record(request, draft):
        if request.remaining > 8:
            key = tuple(request.prompt_ids), request.params.temperature
            drafts[key].append((draft.nodes, draft.depth, [*draft.path]))
        verified(request, draft)

    engine.speculator.verified = record
    return drafts


def test_who_comes_and_what_ends_a_request(make_small_engine, make_plain, rounds):
    """Requests that arrive later, that stop while the next round is in flight, and that need the host."""
    engine = make_small_engine(proposer="head", head="eagle", max_batch=4, page_size=4, **AHEAD)
    oracle = make_plain(small=True)
    stop = oracle([5, 6, 7], SAMPLED).token_ids[11]
    text = replace(SAMPLED, max_tokens=60, stop=("e", "AB"))
    params = [replace(SAMPLED, stop_token_ids=(stop,)), text, *PARAMS, replace(SAMPLED, logprobs=1)]
    params.append(replace(SAMPLED, ignore_eos=False, grammar=Grammar("regex", "[A-M]{9}")))
    requests = list(zip([PROMPTS[index % 5] for index in range(len(params))], params, strict=True))
    answers = answer_all(engine, requests, arrivals=range(0, 4 * len(params), 4))
    assert answers == [oracle(*request) for request in requests]
    assert answers[0].finish_reason == "stop"
    assert rounds["late"] > 5
    assert rounds["launched"] == rounds["read"] + 1  # no request was left in the last one
    engine.generate(PROMPTS[:1], replace(SAMPLED, logprobs=0, max_tokens=2))
    assert rounds["launched"] == rounds["read"]


def test_an_abort_while_a_round_runs(make_small_engine, make_plain, rounds):
    """The aborted request's pages go to another request, whose output they do not affect."""
    engine = make_small_engine(proposer="head", max_batch=2, page_size=4, max_tokens_in_cache=64, **AHEAD)
    long = replace(GREEDY, max_tokens=24)
    first = engine.add(PROMPTS[1], long)
    while not rounds["late"]:
        engine.step()
    second = engine.add(PROMPTS[0], long)
    survivor = engine.request(second)
    for _ in range(2):  # the round in flight is drained, then the prompt is prefilled
        engine.step()
    assert survivor.output_length == 1
    while rounds["late"] < 3:
        engine.step()
    assert rounds["launched"] == rounds["read"] + 1
    old_pages = set(engine.request(first).pages)
    engine.abort(first)
    third = engine.request(engine.add(PROMPTS[2], replace(SAMPLED, max_tokens=9)))
    engine.step()
    assert rounds["launched"] == rounds["read"]  # before any page is allocated
    while engine.has_work:
        engine.step()
        check_pool(engine._pool, engine._scheduler.running)
        old_pages -= set(third.pages)
    assert old_pages != set(range(1, 17))
    oracle = make_plain(small=True)
    assert survivor.output_ids == oracle(PROMPTS[0], long).token_ids
    assert third.output_ids == oracle(PROMPTS[2], replace(SAMPLED, max_tokens=9)).token_ids


def test_pages_are_known_by_the_same_features(make_small_engine, rounds):
    """Pages are published with the same features, from which later requests resume, though the host is a round late."""
    runs = []
    for ahead in (1, 0):
        engine = make_small_engine(proposer="head", page_size=4, **AHEAD | {"graphs": "on" if ahead else "off"})
        publish, calls = engine._pool.pages.publish, []
        engine._pool.pages.publish = lambda *args, publish=publish, calls=calls: (calls.append(args), publish(*args))
        engine.generate(PROMPTS[:1], replace(SAMPLED, max_tokens=40))
        runs.append(calls)
    assert rounds["late"] > 10
    assert len(runs[0]) > 7
    for (page, _, features), (other_page, _, other_features) in zip(*runs, strict=True):
        assert page == other_page
        assert torch.equal(features, other_features)


def test_scarce_pages(make_small_engine, make_plain, rounds):
    """Rounds pre-empt no request: if pages are short, ordinary steps allocate the last ones and pre-empt."""
    engine = make_small_engine(proposer="head", max_batch=5, page_size=4, max_tokens_in_cache=72, **AHEAD)
    oracle = make_plain(small=True)
    params = [replace(item, max_tokens=25) for item in PARAMS]
    assert ids(engine.generate(PROMPTS, params)) == [
        oracle(*item).token_ids for item in zip(PROMPTS, params, strict=True)
    ]
    assert engine.stats.preemptions > 0
    assert rounds["late"] > 0


def test_up_to_the_end_of_the_context(make_small_engine, make_plain, rounds):
    engine = make_small_engine(proposer="head", head="mlp", max_batch=2, **AHEAD)
    endless = replace(GREEDY, max_tokens=200)
    prompts = [[7] * (engine.context - 30), [3, 4]]
    assert ids(engine.generate(prompts, endless)) == [
        make_plain(small=True)(prompt, endless).token_ids for prompt in prompts
    ]
    assert rounds["late"] > 0


def test_what_the_host_has_a_hand_in_goes_step_by_step(make_small_engine, rounds):
    engine = make_small_engine(proposer="head", max_batch=2, **AHEAD)
    for options in ({"logprobs": 0}, {"presence_penalty": 0.1}, {"min_tokens": 2}, {"acceptance": "typical"}):
        engine.generate(PROMPTS[:1], replace(SAMPLED, **options))
    assert not rounds
    engine.set_proposer("ngram")
    engine.generate(PROMPTS[:1], GREEDY)
    assert not rounds


@pytest.mark.parametrize("head", ["eagle", "mlp", "p-eagle, one layer", "dspark"])
def test_chains_exit_early_in_rounds(make_small_engine, make_plain, rounds, monkeypatch, tmp_path, head):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = make_small_engine(head=head, max_batch=6, **AHEAD)
    engine.set_proposer("head", config=replace(engine.proposer_config, adaptive=True))
    engine.speculator.planner = planner = AtAnyPrice(seed=2)
    engine._head.confidence = planner.confidence
    params = [replace(item, max_tokens=40) for item in PARAMS]
    plain = make_plain(small=True)
    assert ids(engine.generate(PROMPTS, params)) == [
        plain(*item).token_ids for item in zip(PROMPTS, params, strict=True)
    ]
    assert rounds["late"] > 20
    assert {1, 2} <= planner.depths
    assert planner.confidence.errors is not None


@pytest.mark.parametrize("proposer", ["head", "ngram", "draft_model"])
def test_where_drafting_does_not_pay_plain_rounds_go_ahead(
    make_small_engine, make_plain, rounds, monkeypatch, tmp_path, proposer
):
    """Plain rounds overlap and report their durations to the planner; a drafter starts tracking in ordinary steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = make_small_engine(max_batch=6, **AHEAD)
    engine.set_proposer(proposer, config=replace(engine.proposer_config, adaptive=True))
    assert not rounds  # profiling uses none
    records = []

    class Recorder(Switch):
        def record_step(self, batch, rows, drafting, seconds) -> None:
            records.append((rounds["read"], batch, rows, drafting, seconds > 0))

    engine.speculator.planner = switch = Recorder()
    names = [engine.add(*item) for item in zip(PROMPTS, [replace(item, max_tokens=80) for item in PARAMS], strict=True)]
    requests = [engine.request(name) for name in names]
    for _ in range(20):
        engine.step()
    ahead = rounds["late"]
    assert ahead > 10
    assert [item for item in records if item[0]] == [(2 + number, 5, 5, None, True) for number in range(ahead - 1)]
    assert not any(item.stats.drafted for item in requests)
    switch.pays = True
    while engine.has_work:
        engine.step()
    assert any(item.stats.drafted for item in requests)
    plain = make_plain(small=True)
    assert [item.output_ids for item in requests] == [
        plain(item.prompt_ids, item.params).token_ids for item in requests
    ]
    check_pool(engine._pool, [])


def test_probes_find_out_between_rounds_ahead(make_small_engine, make_plain, rounds, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = make_small_engine(max_batch=6, **AHEAD)
    engine.set_proposer("head", config=replace(engine.proposer_config, adaptive=True))
    curve = Curve((1.0, 2.0), (0.005, 0.01))  # cost proportional to rows
    costs = CostModel(CostTable((1, 4), (curve, curve), {"head": (curve, curve)}))
    engine.speculator.planner = controller = Controller(costs, AcceptanceModel({"head": [0.0]}), probe_share=0.15)
    record_step = controller.record_step
    controller.record_step = lambda batch, rows, drafting, seconds: record_step(batch, rows, drafting, 0.005 * rows)
    params = replace(GREEDY, max_tokens=150)
    requests = [engine.request(engine.add(prompt, params)) for prompt in PROMPTS[:3]]
    while engine.has_work:
        engine.step()
    assert rounds["late"] > 20
    assert any(request.stats.drafted for request in requests)
    plain = make_plain(small=True)
    assert [request.output_ids for request in requests] == [plain(prompt, params).token_ids for prompt in PROMPTS[:3]]


class Lives(test_lives.Lives):
    """Requests most of which do not need the host between rounds."""

    drafts = {  # noqa: RUF012
        "none": {},
        "eagle": {"proposer": "head", "head": "eagle"},
        "eagle3": {"proposer": "head"},
        "mlp": {"proposer": "head", "head": "mlp"},
        "p-eagle": {"proposer": "head", "head": "p-eagle, one layer"},
        "dflash": {"proposer": "head", "head": "dflash"},
        "eagle3 tree": {"proposer": "head", "shape": {"tree": "beam:3x4:10"}},
        "mlp tree": {"proposer": "head", "head": "mlp", "shape": {"tree": "beam:2x4"}},
        "dspark tree": {"proposer": "head", "head": "dspark", "shape": {"tree": "beam:2x4"}},
    }
    config = AHEAD

    @staticmethod
    def random_params(rng):
        params, base = random_params(rng), SamplingParams(max_tokens=1)
        if rng.random() < 0.1:
            return params
        field_names = (
            "max_tokens",
            "temperature",
            "seed",
            "top_k",
            "top_p",
            "min_p",
            "n",
            "stop",
            "stop_token_ids",
            "ignore_eos",
        )
        return replace(base, **{name: getattr(params, name) for name in field_names})


@pytest.mark.slow
def test_lives_with_rounds_ahead(make_small_engine, make_plain, rounds, request):
    seen: Counter = Counter()
    test_lives.live(partial(Lives, make_small_engine, make_plain, seen), request.config.getoption("--soak") // 40)
    assert all(seen[name] > 0 for name in ("stop", "length", "abort", "pre-empted", "accepted", "adopted pages")), seen
    assert rounds["late"] > 100
