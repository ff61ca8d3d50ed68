"""Decoding and drafting in the padded buffers of CUDA graphs change no token or draft; what fits no graph runs too.

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
from infer.graphs.capture import wants_graphs
from infer.graphs.cuda_graph import Buckets, Graph, doubling
from infer.parallel.target_worker import Shard
from infer.request import DrafterState, SamplingParams
from tests.heads import make_head
from tests.lossless.plain import ids
from tests.lossless.test_controller import Switch

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=3)
CUT = replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.01)
PROMPTS = [[5, 6, 7], [9] * 17, list(range(10, 50)), [8], [5, 6, 7] * 4]
PARAMS = [GREEDY, SAMPLED, CUT, replace(CUT, max_draft_tokens=2), replace(SAMPLED, presence_penalty=0.5, logprobs=2)]
TREE = {"tree": "beam:3x4:9"}


@pytest.fixture
def replays(monkeypatch):
    """Count replays by what the graph captured: a draft, a round or a verify."""
    counts: Counter[str] = Counter()
    replay = Graph.__call__

    def counted(self):
        kind = repr(self._run)
        counts["draft" if "DraftGraphs" in kind else "round" if "RoundGraphs" in kind else "verify"] += 1
        return replay(self)

    monkeypatch.setattr(Graph, "__call__", counted)
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


@pytest.mark.parametrize(
    ("proposer", "shape", "head"),
    [
        ("none", None, "eagle3, whole vocabulary"),
        ("head", None, "eagle3, whole vocabulary"),
        ("head", None, "mlp"),
        ("head", TREE, "eagle3, whole vocabulary"),
        ("head", None, "medusa"),
        ("head", TREE, "p-eagle, one layer"),
        ("draft_model", None, "eagle3, whole vocabulary"),
        ("combined", None, "eagle3, whole vocabulary"),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "batches", "rows"), [(torch.float32, None, None), (torch.bfloat16, [6], [16])], ids=["tight", "wide"]
)
def test_graphs_change_nothing(make_small_engine, expected, replays, dtype, proposer, shape, head, batches, rows):
    """With buckets that fit as tightly as possible, and with one that is much too large."""
    engine = make_small_engine(
        dtype, proposer, shape, head=head, threads=1, graphs="on", graph_batches=batches, graph_rows=rows, max_batch=6
    )
    assert engine.graphs.count > 0
    assert responses(engine) == expected(dtype, proposer, shape, head)
    assert replays["verify"] > 3
    assert (replays["draft"] > 3) == (proposer in ("head", "combined"))
    engine._pool.invariants([])


def test_what_fits_no_graph_runs_without(make_small_engine, expected, replays):
    """More requests, more rows and longer contexts than captured, after which drafts begin with many unread rows."""
    plain = [token_ids for token_ids, *_ in expected(torch.float32, "none", None, "eagle3, whole vocabulary")]
    sizes = [{"graph_batches": [2]}, {"graph_rows": [3]}, {"graph_context": 45}]
    for limits in sizes:
        engine = make_small_engine(torch.float32, "head", threads=1, max_batch=5, graphs="on", **limits)
        replays.clear()
        verify = engine._runner.verify

        def counted(*arguments, verify=verify):
            replays["all"] += 1
            return verify(*arguments)

        engine._runner.verify = counted
        assert ids(engine.generate(PROMPTS, PARAMS)) == plain
        assert 0 < replays["verify"] < replays["all"], limits


def test_a_head_that_was_woken_late(make_small_engine, replays):
    """A head whose KV begins at a page within the text: graphs draft what steps without graphs do."""
    results = []
    configs = ({"graphs": "on"}, {"graphs": "on", "rounds_ahead": 1}, {"graphs": "off"})
    for config in configs:
        for shape in (None, TREE):
            engine = make_small_engine(torch.float32, "head", shape, threads=1, max_batch=2, page_size=4, **config)
            engine.speculator.planner = switch = Switch()
            requests = [engine.request(engine.add(prompt, replace(GREEDY, max_tokens=72))) for prompt in PROMPTS[:2]]
            for _ in range(10):
                engine.step()
            assert not replays["draft"]
            switch.pays = True
            while engine.has_work:
                engine.step()
            assert [item.drafter_state for item in requests] == [DrafterState.PARTIAL, DrafterState.PARTIAL]
            results.append([(item.output_ids, item.stats) for item in requests])
            assert (replays["draft"] > 0, replays["round"] > 9) == (config != configs[2], config == configs[1])
            replays.clear()
    assert results[:2] == results[4:]
    assert [item for item, _ in results[2] + results[3]] == [item for item, _ in results[4] + results[5]]


def test_new_proposers_are_recorded(make_small_engine, replays):
    engine = make_small_engine(torch.float32, "none", threads=1, max_batch=2, graphs="on")
    before = engine.graphs.count
    wanted = ids(engine.generate(PROMPTS[:2], GREEDY))
    engine.set_proposer("head", config=replace(engine.proposer_config, max_draft_tokens=9))
    assert engine.graphs.count > before
    replays.clear()
    assert ids(engine.generate(PROMPTS[:2], GREEDY)) == wanted
    assert replays["draft"] > 0


def test_off_by_default_without_a_gpu(make_small_engine, replays):
    engine = make_small_engine(torch.float32, "head", threads=1)
    engine.generate(PROMPTS[:1], GREEDY)
    assert engine.graphs is None
    assert not replays


def test_buckets():
    assert doubling(1) == (1,)
    assert doubling(6) == (1, 2, 4, 6)
    buckets = Buckets((1, 4), (1, 6), most=12, longest=100)
    assert buckets.fit(1, 1) == (1, 1)
    assert buckets.fit(2, 1) == (4, 1)
    assert buckets.fit(1, 2) == (1, 6)
    assert buckets.fit(2, 2) is None  # 24 rows
    assert buckets.fit(5, 1) is None
    assert buckets.all() == [(1, 6), (4, 1), (1, 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": "maybe"}, "engine.graphs=maybe"),
        ({"graph_rows": []}, r"engine.graph_rows=\[\]"),
        ({"graph_batches": [0, 2]}, r"engine.graph_batches=\[0, 2\]"),
        ({"graphs": "on", "tensor_parallel": 2}, "engine.graphs=on: not with engine.tensor_parallel"),
    ],
)
def test_what_cannot_be_asked_for(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_sizes_of_which_none_is_left(make_small_engine):
    with pytest.raises(ValueError, match=r"engine.graph_batches=\[64\].*engine.max_batch=2"):
        make_small_engine(graphs="on", graph_batches=[64], max_batch=2)


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
    engine = make_engine(proposer="none", graphs="on", rounds_ahead=1, threads=1)
    heads = [make_head(engine.target, variant) for variant in ("eagle", "eagle", "eagle3, two layers", "mlp")]
    gc.collect()
    monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()
    try:
        for head in heads:
            old_refs = [*graph_refs, weakref.ref(engine._runner.graphs), weakref.ref(engine.head)]
            pools.append(weakref.ref(engine._pool))
            graph_refs.clear()
            engine.set_proposer("head", head)
            assert graph_refs
            assert [ref() for ref in old_refs if ref() is not None] == []
            assert pools[-1]() in (None, engine._pool)
        assert [ref() for ref in pools].count(None) >= 2  # a head with other KV layers gets a new pool
    finally:
        gc.enable()
