"""Draft trees change no token: dynamic, fixed and adversarial ones, with the KV moves that they require."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from infer.batch.tree import Budget
from infer.request import SamplingParams
from kernels.cpu.library import SWITCH, library
from tests.heads import ONE_OF_EACH, WINDOWED
from tests.lossless.oracles import Thicket
from tests.lossless.plain import GREEDY, SAMPLED, ids
from tests.pairwise import parametrize_each, parametrize_pairs
from tests.pools import check_pool

SHAPES = {
    "wide": {"tree": "beam:6x4"},
    "few nodes": {"tree": "beam:4x4:5"},
    "fixed": {"tree": [[0], [1], [2], [0, 0], [1, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0]]},
}


@pytest.mark.parametrize(
    ("dtype", "shape", "batch"),
    [  # every pair of two
        (torch.float32, "wide", 8),
        (torch.bfloat16, "wide", 1),
        (torch.float32, "few nodes", 1),
        (torch.bfloat16, "few nodes", 8),
        (torch.float32, "fixed", 8),
        (torch.bfloat16, "fixed", 1),
    ],
)
def test_head_trees(make_engine, prompts, expected, dtype, shape, batch):
    engine = make_engine(dtype, "head", shape=SHAPES[shape], max_batch=batch)
    subset = slice(1, None, 2) if batch == 1 else slice(None)  # one at a time they take long
    for params in (GREEDY, SAMPLED):
        completions = engine.generate(prompts[subset], params)
        assert ids(completions) == expected[dtype, params][subset]
        stats = [completion.stats for completion in completions]
        assert 0 < sum(stat.accepted for stat in stats) < sum(stat.drafted for stat in stats)
    check_pool(engine._pool, [])


@pytest.fixture
def torch_kernels(monkeypatch):
    """Run as on a machine without a C compiler."""
    monkeypatch.setenv(SWITCH, "torch")
    library.cache_clear()
    assert library() is None
    yield
    library.cache_clear()


@pytest.mark.parametrize(("dtype", "params"), [(torch.float32, SAMPLED), (torch.bfloat16, GREEDY)])
def test_chains_and_trees_without_the_c_kernels(make_engine, prompts, torch_kernels, dtype, params):
    subset = prompts[1::3]  # lengths past the edge of a page and at that of a tile, and a prompt that repeats itself
    two_sources, params = {"sources": ["head", "draft_model"]}, replace(params, max_tokens=16)
    plain = make_engine(dtype, "none", max_batch=1)
    expected = [ids(plain.generate([prompt], params))[0] for prompt in subset]
    accepted = 0
    for proposer, shape in (("head", None), ("head", SHAPES["few nodes"]), ("combined", two_sources)):
        engine = make_engine(dtype, proposer, shape=shape, draft_model="same", prefill_chunk=100)
        completions = engine.generate(subset, params)
        assert ids(completions) == expected
        assert all(completion.stats.drafted > 0 for completion in completions)
        accepted += sum(completion.stats.accepted for completion in completions)
    assert accepted > len(subset) * 6  # the draft model is the target itself


@parametrize_each({"head": [*ONE_OF_EACH, *WINDOWED], "shape, params": [("wide", SAMPLED), ("fixed", GREEDY)]})
def test_trees_of_every_head(make_engine, prompts, expected, head, shape, params):
    """Both shapes with both parameters: `test_head_trees`."""
    engine = make_engine(head=head, shape=SHAPES[shape], max_batch=8, max_tokens_in_cache=512)
    completions = engine.generate(prompts, params)
    assert ids(completions) == expected[torch.float32, params]
    stats = [completion.stats for completion in completions]
    assert 0 < sum(stat.accepted for stat in stats) < sum(stat.drafted for stat in stats)
    check_pool(engine._pool, [])


def test_an_lstm_speculator_beside_suffixes(make_engine, prompts, expected):
    """Arctic's published combination: each source adds tokens that are accepted to those of the other."""
    steps = {}
    for proposer in ("head", "suffix", "combined"):
        shape = {"sources": ["suffix", "head"]} if proposer == "combined" else {}
        engine = make_engine(proposer=proposer, head="lstm", shape=shape, max_batch=8)
        for params in (GREEDY, SAMPLED):
            completions = engine.generate(prompts, params)
            assert ids(completions) == expected[torch.float32, params]
            if params is GREEDY:
                steps[proposer] = sum(completion.stats.steps for completion in completions)
    assert steps["combined"] < min(steps["head"], steps["suffix"])


@pytest.mark.parametrize("head", [None, WINDOWED[0]])
def test_trees_under_memory_pressure(make_engine, prompts, expected, head):
    engine = make_engine(head=head, shape=SHAPES["wide"], max_batch=8, max_tokens_in_cache=384, page_size=4)
    for params in (GREEDY, SAMPLED):
        assert ids(engine.generate(prompts, params)) == expected[torch.float32, params]
    assert engine.stats.preemptions > 0
    check_pool(engine._pool, [])


def test_trees_at_the_end_of_the_context(make_engine):
    """Where a tree takes more places than the context has positions left, the output still fills the context."""
    plain, trees = make_engine(proposer="none"), make_engine(shape=SHAPES["wide"])
    for left in (1, 2, 3, 7):
        prompt = [[3] * (plain.context - left)]
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        (completion,) = trees.generate(prompt, params)
        assert len(completion.token_ids) == left
        assert completion.token_ids == plain.generate(prompt, params)[0].token_ids


@parametrize_pairs({"dtype": [torch.float32, torch.bfloat16], "params": [GREEDY, SAMPLED], "seed": [0, 1]})
def test_any_valid_tree(make_engine, prompts, expected, dtype, params, seed):
    responses = {tuple(p): a for p, a in zip(prompts, expected[dtype, params], strict=True)}
    engine = make_engine(dtype, "ngram", drafts=12, max_batch=5)
    engine.add_proposer(Thicket(lambda request: responses[tuple(request.prompt_ids)], seed), Budget(12, 12))
    completions = engine.generate(prompts, params)
    assert ids(completions) == expected[dtype, params]
    assert engine.stats.speculation.acceptance_length > 1.5
