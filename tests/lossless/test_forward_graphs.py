"""Steps that the host runs replay a head's drafts and the target's forward: beside a prompt, for requests that need the
host, and for drafts that are made there. No token, log-probability or draft changes.

On a CPU a replay calls the function that would have been captured, on the same padded tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from infer.batch.grammar import Grammar
from infer.graphs.forward_graph import ForwardGraphs
from infer.graphs.step_graph import StepGraphs
from infer.request import SamplingParams
from infer.speculation.proposers.head import HeadProposer
from infer.steps.step import StepRunner
from tests.lossless.plain import answer_all, ids
from tests.lossless.test_controller import AtAnyPrice, AtRandom
from tests.pools import check_pool

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=3, top_k=20)
PROMPTS = [[5, 6, 7], [9] * 17, list(range(10, 50)), [8], [5, 6, 7] * 4]
NEED_HOST = {
    "logprobs": replace(SAMPLED, logprobs=2),
    "penalties": replace(GREEDY, presence_penalty=0.5, repetition_penalty=1.2),
    "bias": replace(SAMPLED, logit_bias={7: 3.0, 9: -100.0}),
    "grammar": replace(SAMPLED, ignore_eos=False, grammar=Grammar("regex", "[A-M]{18}")),
}
DRAFTS = {
    "none": {"proposer": "none"},
    "chain": {"proposer": "head"},
    "tree": {"proposer": "head", "shape": {"tree": "beam:3x4:9"}},
    "n-gram": {"proposer": "ngram"},
    "draft model": {"proposer": "draft_model", "draft_model": "other"},
    "combined": {"proposer": "combined"},
}


@pytest.fixture
def forwards(monkeypatch):
    """Count decodes that the host runs, and of these those that replay their forward: "chain" and "tree" drafts. Also
    count a head's drafts in them, as "proposed", and of these those that are "drafted" by a replay.
    """
    counts: Counter[str] = Counter()
    verify, replay, draft, propose = (
        StepRunner.verify_drafts,
        ForwardGraphs.replay,
        StepGraphs.draft,
        HeadProposer.propose,
    )

    def drafted(self, *args):
        result = draft(self, *args)
        counts["drafted"] += result is not None
        return result

    def proposed(self, *args):
        counts["proposed"] += 1
        return propose(self, *args)

    def verified(self, requests, tree):
        counts["decodes"] += 1
        return verify(self, requests, tree)

    def replayed(self, tree, *rest):
        rows = replay(self, tree, *rest)
        if rows is not None:
            counts["replays"] += 1
            counts["chain" if tree.is_chain else "tree"] += tree.token.shape[1] > 1
        return rows

    monkeypatch.setattr(StepRunner, "verify_drafts", verified)
    monkeypatch.setattr(ForwardGraphs, "replay", replayed)
    monkeypatch.setattr(StepGraphs, "draft", drafted)
    monkeypatch.setattr(HeadProposer, "propose", proposed)
    return counts


def answers(engine, requests):
    """Return the requests' outputs, and how much was drafted for them."""
    drafted = engine.stats.speculation.drafted
    return answer_all(engine, list(requests)), engine.stats.speculation.drafted - drafted


@pytest.mark.parametrize(
    ("dtype", "drafts"),
    [*((torch.float32, drafts) for drafts in DRAFTS), *((torch.bfloat16, drafts) for drafts in ("chain", "tree"))],
)
def test_one_request_that_needs_the_host(make_small_engine, forwards, dtype, drafts):
    """Beside plain requests, one after the other. The host's steps draft the same with graphs and without."""
    results = []
    for graphs in ("on", "off"):
        engine = make_small_engine(dtype, threads=1, max_batch=3, graphs=graphs, **DRAFTS[drafts])
        for need, params in NEED_HOST.items():
            forwards.clear()
            batch = [(PROMPTS[0], replace(GREEDY, max_tokens=40)), (PROMPTS[2], SAMPLED), (PROMPTS[4], params)]
            results.append(answers(engine, batch)[0])
            assert forwards["decodes"] > 3
            assert forwards["replays"] == (forwards["decodes"] if graphs == "on" else 0)
            if graphs == "on" and (need, drafts) != ("grammar", "chain") and drafts in ("chain", "tree"):
                assert forwards["drafted"] == forwards["proposed"] > 2
        check_pool(engine._pool, [])
    half = len(NEED_HOST)
    assert results[:half] == results[half:]
    assert all(answer.logprobs for answer in results[0][2:])


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_prompt_beside_requests_that_decode(make_small_engine, make_plain, forwards, drafts):
    """Prompts that arrive one by one, in chunks: the others replay their forward in the same steps."""
    engine = make_small_engine(threads=1, max_batch=4, prefill_chunk=4, graphs="on", **DRAFTS[drafts])
    beside, prefill = Counter(), engine.steps.prefill

    def prefilled(*args):
        beside[forwards["replays"] > beside["replays"]] += 1
        beside["replays"] = forwards["replays"]
        return prefill(*args)

    engine.steps.prefill = prefilled
    requests = list(zip(PROMPTS, [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY], strict=True))
    oracle = make_plain(small=True)
    wanted = [oracle(*request) for request in requests]
    forwards.clear()
    assert answer_all(engine, requests, range(0, 20, 4)) == wanted
    assert beside[True] > 8
    assert forwards["replays"] == forwards["decodes"]
    assert drafts not in ("chain", "tree") or forwards["drafted"] == forwards["proposed"] > 8
    kind = {"none": None, "tree": "tree", "combined": "tree"}.get(drafts, "chain")
    assert kind is None or forwards[kind] > 0


@pytest.mark.parametrize(
    ("drafts", "rule"), [("chain", "typical"), ("chain", "block"), ("tree", "block"), ("n-gram", "typical")]
)
def test_lossy_rules(make_small_engine, forwards, drafts, rule):
    """A block rule in an engine that drafts trees drafts a chain, for which the tree's graph is replayed."""
    results = []
    for graphs in ("on", "off"):
        engine = make_small_engine(threads=1, max_batch=2, graphs=graphs, **DRAFTS[drafts])
        params = replace(SAMPLED, acceptance=rule), replace(SAMPLED, logprobs=0)
        results.append(answers(engine, zip(PROMPTS[::4], params, strict=True)))
        assert forwards["replays"] == forwards["decodes"] if graphs == "on" else not forwards["replays"]
        forwards.clear()
    assert results[0] == results[1]


@pytest.mark.parametrize("drafts", ["chain", "tree", "n-gram", "combined"])
def test_budgets_at_random(make_small_engine, make_plain, forwards, drafts):
    """Trees of every number of nodes, and none for some requests, padded to one width."""
    engine = make_small_engine(threads=1, max_batch=5, graphs="on", page_size=4, **DRAFTS[drafts])
    engine.speculator.planner = AtRandom(seed=1)
    params = [replace(item, max_tokens=40, logprobs=0) for item in (GREEDY, SAMPLED, GREEDY, SAMPLED, SAMPLED)]
    oracle = make_plain(small=True)
    wanted = [oracle(*item).token_ids for item in zip(PROMPTS, params, strict=True)]
    forwards.clear()
    assert ids(engine.generate(PROMPTS, params)) == wanted
    assert forwards["replays"] == forwards["decodes"] > 10
    assert forwards["chain"] + forwards["tree"] > 5
    check_pool(engine._pool, [])


@pytest.mark.parametrize("head", ["eagle", "mlp", "p-eagle, one layer", "dspark"])
def test_chains_exit_early(make_small_engine, make_plain, forwards, monkeypatch, tmp_path, head):
    """On the device, by the terms of each step, from whose outcomes the host learns."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = make_small_engine(head=head, threads=1, max_batch=5, graphs="on")
    engine.set_proposer("head", config=replace(engine.proposer_config, adaptive=True))
    engine.speculator.planner = planner = AtAnyPrice(seed=2)
    engine._head.confidence = planner.confidence
    params, oracle = [replace(item, max_tokens=40, logprobs=0) for item in (GREEDY, SAMPLED)], make_plain(small=True)
    wanted = [oracle(*item).token_ids for item in zip(PROMPTS[::4], params, strict=True)]
    forwards.clear()
    assert ids(engine.generate(PROMPTS[::4], params)) == wanted
    assert forwards["drafted"] == forwards["proposed"] > 10
    assert {1, 2} <= planner.depths
    assert planner.confidence.errors is not None


def test_what_fits_no_graph_is_not_replayed(make_small_engine, make_plain, forwards):
    """More rows than were captured, another proposer's trees, and the end of the context."""
    params = replace(SAMPLED, logprobs=0)
    oracle = make_plain(small=True)
    many = make_small_engine(threads=1, max_batch=4, max_rows=12, graphs="on", proposer="head")
    other = make_small_engine(threads=1, max_batch=2, graphs="on", proposer="ngram")
    chains = make_small_engine(threads=1, max_batch=2, graphs="on", proposer="head")
    end = [7] * (chains.context - 20)
    for engine, prompts, item, some in (
        (many, PROMPTS[:3], params, True),
        (other, PROMPTS[:1], replace(params, proposer="combined"), False),  # which reads features
        (chains, [end], replace(params, max_tokens=100), True),
    ):
        wanted = [oracle(prompt, item).token_ids for prompt in prompts]
        forwards.clear()
        assert ids(engine.generate(prompts, item)) == wanted
        assert forwards["replays"] < forwards["decodes"]
        assert (forwards["replays"] > 0) == some
