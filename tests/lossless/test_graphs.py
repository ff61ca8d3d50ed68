"""Decode steps in the padded tensors of CUDA graphs change no token or draft; what fits no graph runs too.

On a CPU a replay calls the function that would have been captured, on the same buffers.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from infer.config import EngineConfig
from infer.graphs.cuda_graph import Graph, doubling, every_second
from infer.graphs.step_graph import StepGraphs, wants_graphs
from infer.processes.target_worker import Shard
from infer.request import DrafterState, SamplingParams
from infer.steps.step import StepRunner
from tests.heads import ONE_OF_EACH, make_head
from tests.lossless.leftovers import assert_nothing_left
from tests.lossless.plain import ids
from tests.lossless.test_controller import Switch
from tests.pairwise import parametrize_each
from tests.pools import check_pool

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=3)
CUT = replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.01)
PROMPTS = [[5, 6, 7], [9] * 17, list(range(10, 50)), [8], [5, 6, 7] * 4]
PARAMS = [GREEDY, SAMPLED, CUT, replace(CUT, max_draft_tokens=2), replace(SAMPLED, presence_penalty=0.5, logprobs=2)]
PARAMS[-1] = replace(PARAMS[-1], max_tokens=5)  # until it has ended, the host runs all steps
TREE = {"tree": "beam:3x4:9"}


@pytest.fixture
def replays(monkeypatch):
    """Count replays of whole steps, and of forwards in steps that the host runs."""
    counts: Counter[str] = Counter()
    replay, launch = Graph.__call__, StepGraphs.launch

    def counted(self):
        counts["forward"] += 1
        return replay(self)

    def launched(self):
        counts.update({"step": 1, "forward": -1})
        return launch(self)

    monkeypatch.setattr(Graph, "__call__", counted)
    monkeypatch.setattr(StepGraphs, "launch", launched)
    return counts


@pytest.fixture(scope="module")
def expected(make_small_engine):
    """By kind of draft: outputs without graphs, and how much was drafted and accepted for them."""
    results = {}

    def make(dtype, proposer, shape, head):
        key = dtype, proposer, shape is None, head
        if key not in results:
            results[key] = responses(make_small_engine(dtype, proposer, shape, head=head, threads=1))
        return results[key]

    return make


def responses(engine):
    return [(c.token_ids, c.logprobs, c.stats) for c in engine.generate(PROMPTS, PARAMS)]


@parametrize_each(
    {
        "proposer, shape, head": [
            ("none", None, "eagle3, whole vocabulary"),
            ("none", None, "eagle3, whole vocabulary"),
            ("head", None, "eagle3, whole vocabulary"),
            ("head", None, "mlp"),
            ("head", None, "medusa"),
            ("head", TREE, "eagle3, whole vocabulary"),
            ("head", TREE, "p-eagle, one layer"),
            ("head", None, "dspark"),
            ("head", TREE, "dflash2"),
            ("head", None, "dspark"),
        ],
        "dtype, wide": [(torch.float32, False), (torch.bfloat16, True)],
    }
)
def test_graphs_change_nothing(make_small_engine, expected, replays, monkeypatch, dtype, proposer, shape, head, wide):
    """With batch sizes that fit as tightly as possible, and with one that is much too large."""
    if wide:
        monkeypatch.setattr("infer.graphs.step_graph.doubling", lambda most: (most,))
    engine = make_small_engine(dtype, proposer, shape, head=head, threads=1, graphs="on", max_batch=6)
    # Of 4 batch sizes: steps, with drafts also without a search; of 3: forwards of one node and of many, and drafts.
    most, some = (1, 1) if wide else (4, 3)
    assert engine.graphs.count == (most + some if proposer == "none" else 2 * most + (2 + 1) * some)
    actual, wanted = responses(engine), expected(dtype, proposer, shape, head)
    if shape is not None:  # the last trees are grown to full depth, since the host reads a step late
        actual, wanted = (
            [(*one, s.steps, s.emitted, s.accepted_by_position) for *one, s in each] for each in (actual, wanted)
        )
    assert actual == wanted
    assert replays["step"] > 3
    assert replays["forward"] > 0  # while the last request runs
    check_pool(engine._pool, [])


@parametrize_each({"head": ONE_OF_EACH, "head_weights": ["int8", "same"]})
def test_a_head_of_the_same_shape_is_not_captured_again(make_small_engine, monkeypatch, head, head_weights):
    """As in the evaluations of a training run. With the first weights again, drafts are the first ones again."""
    captures, capture = Counter(), Graph.__init__
    monkeypatch.setattr(Graph, "__init__", lambda self, *parts: (captures.update(["graph"]), capture(self, *parts))[1])
    engine = make_small_engine(
        torch.float32, "head", None, head=head, threads=1, graphs="on", head_weights=head_weights
    )
    wanted, packed = responses(engine), engine.head
    engine.set_proposer("none")
    captured = captures["graph"]
    for seed in (5, 4):
        engine.set_proposer("head", make_head(engine.target, head, seed=seed))
        assert engine.head is packed
        assert (responses(engine) == wanted) == (seed == 4)
        engine.set_proposer("none")
        engine.generate(PROMPTS[:1], GREEDY)
    assert captures["graph"] == captured > 0


def test_what_fits_no_graph_runs_without(make_small_engine, expected, replays, monkeypatch):
    """More requests and longer contexts than captured, after which drafts begin with many unread rows."""
    plain = [token_ids for token_ids, *_ in expected(torch.float32, "none", None, "eagle3, whole vocabulary")]
    for name, limit in (("doubling", lambda most: (2,)), ("MAX_CONTEXT", 45)):
        with monkeypatch.context() as patch:
            patch.setattr(f"infer.graphs.step_graph.{name}", limit)
            engine = make_small_engine(torch.float32, "head", threads=1, max_batch=5, graphs="on")
        replays.clear()
        decode = engine._runner.decode

        def counted(*arguments, decode=decode):
            replays["all"] += 1
            return decode(*arguments)

        engine._runner.decode = counted
        assert ids(engine.generate(PROMPTS, PARAMS)) == plain
        assert 0 < replays["step"] < replays["all"], name


def test_how_much_is_captured(make_small_engine, monkeypatch, tmp_path):
    """At defaults: of every batch size a plain step and two that draft, of every second one draft and two forwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = make_small_engine(max_batch=EngineConfig().max_batch, max_rows=EngineConfig().max_rows, graphs="on")
    engine.set_proposer("head", config=replace(engine.proposer_config, adaptive=True))
    sizes = doubling(EngineConfig().max_batch)
    assert engine.graphs.count == 3 * len(sizes) + 3 * len(every_second(sizes)) == 30
    engine.set_proposer("ngram")  # whose drafts are made on the host: the forward alone is what every step replays
    assert engine.graphs.count == 3 * len(sizes) == 18


def test_step_costs_are_profiled_by_replays(make_engine, monkeypatch, tmp_path):
    """On a clock that only steps advance: captured ones by 2 ms, or 5 with drafts, and those of the host by 9."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    now, launch, verify = 0.0, StepGraphs.launch, StepRunner.verify_drafts

    def launched(graphs):
        nonlocal now
        now += 2e-3 if graphs.drafter == "none" else 5e-3
        return launch(graphs)

    def verified(*arguments):
        nonlocal now
        now += 9e-3
        return verify(*arguments)

    monkeypatch.setattr(StepGraphs, "launch", launched)
    monkeypatch.setattr(StepRunner, "verify_drafts", verified)
    engine = make_engine(proposer="none", max_batch=2, graphs="on", timer=lambda: now)
    wanted = ids(engine.generate(PROMPTS, GREEDY))
    engine.set_proposer("head", config=replace(engine.proposer_config, adaptive=True))
    table = engine.speculator.planner.costs.table
    assert table.batches == (1, 2)
    assert_nothing_left(engine)
    for batch, steps, drafts in zip(table.batches, table.steps, table.drafts["head"], strict=True):
        assert [steps(batch), steps(5 * batch)] == pytest.approx([2e-3] * 2)
        assert [drafts(depth) for depth in (1, 4)] == pytest.approx([3e-3] * 2)
    assert ids(engine.generate(PROMPTS, GREEDY)) == wanted


def test_a_head_that_was_woken_late(make_small_engine, replays):
    """A head whose KV begins at a page within the text: graphs draft what steps without graphs do."""
    results = {}
    for graphs in ("on", "off"):
        for shape in (None, TREE):
            engine = make_small_engine(torch.float32, "head", shape, threads=1, max_batch=2, page_size=4, graphs=graphs)
            engine.speculator.planner = switch = Switch()
            requests = [engine.request(engine.add(prompt, replace(GREEDY, max_tokens=72))) for prompt in PROMPTS[:2]]
            for _ in range(10):
                engine.step()
            assert not replays["step"]
            switch.pays = True
            while engine.has_work:
                engine.step()
            assert [item.drafter.state for item in requests] == [DrafterState.PARTIAL, DrafterState.PARTIAL]
            results[graphs, shape is None] = [item.output_ids for item in requests]
            assert (replays["step"] > 9) == (graphs == "on")
            replays.clear()
    assert results["on", True] == results["off", True] == results["on", False] == results["off", False]


def test_new_proposers_are_recorded(make_small_engine, replays):
    engine = make_small_engine(torch.float32, "none", threads=1, max_batch=2, graphs="on")
    assert [graphs.drafter for graphs in engine.graphs.graphs] == ["none"]
    wanted = ids(engine.generate(PROMPTS[:2], GREEDY))
    engine.set_proposer("head", config=replace(engine.proposer_config, max_draft_tokens=9))
    assert [graphs.drafter for graphs in engine.graphs.graphs] == ["head"]
    replays.clear()
    assert ids(engine.generate(PROMPTS[:2], GREEDY)) == wanted
    assert replays["step"] > 0


def test_off_by_default_without_a_gpu(make_small_engine, replays):
    engine = make_small_engine(torch.float32, "head", threads=1)
    engine.generate(PROMPTS[:1], GREEDY)
    assert engine.graphs is None
    assert not replays


def test_batch_sizes():
    assert doubling(1) == (1,)
    assert doubling(6) == (1, 2, 4, 6)
    assert [every_second(doubling(most)) for most in (1, 2, 6, 32)] == [(1,), (1, 2), (1, 4, 6), (1, 4, 16, 32)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": "maybe"}, "engine.graphs=maybe"),
        ({"graphs": "on", "tensor_parallel": 2}, "engine.graphs=on: not with engine.tensor_parallel"),
    ],
)
def test_what_cannot_be_asked_for(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_a_mixture_of_experts_is_not_recorded():
    config = SimpleNamespace(experts=object())
    shard = cast(Shard, SimpleNamespace(target=SimpleNamespace(config=config), device=torch.device("cpu"), ranks=1))
    assert not wants_graphs(EngineConfig(), shard)
    with pytest.raises(ValueError, match="engine.graphs=on: which experts"):
        wants_graphs(EngineConfig(graphs="on"), shard)


def test_what_is_replaced_is_let_go_of_at_once(make_engine, monkeypatch):
    """Graphs, heads and the pool, gigabytes on a GPU, are freed without a garbage collection. As after a capture, the
    patched graphs do not reference what they ran.
    """
    graph_refs, pools = [], []

    def recorded(self, run, memory):
        graph_refs.append(weakref.ref(self))
        self._run = self._recorded = None

    monkeypatch.setattr(Graph, "__init__", recorded)
    engine = make_engine(proposer="none", graphs="on", threads=1)
    variants = ("eagle", "eagle, fc with bias", "eagle3, two layers", "mlp")
    heads = [make_head(engine.target, variant) for variant in variants]
    gc.collect()
    monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()
    try:
        for head in heads:
            old_refs = [*graph_refs, weakref.ref(engine.graphs.graphs[0]), weakref.ref(engine.head)]
            pools.append(weakref.ref(engine._pool))
            graph_refs.clear()
            engine.set_proposer("head", head)
            assert graph_refs
            assert [ref() for ref in old_refs if ref() is not None] == []
            assert pools[-1]() in (None, engine._pool)
        assert [ref() for ref in pools].count(None) >= 2  # a head with other KV layers gets a new pool
    finally:
        gc.enable()
