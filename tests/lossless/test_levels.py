"""Drafting a level of a chain or a tree in one C call gives the drafts, keys and values of the head's operations."""

from __future__ import annotations

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import DrafterState, SamplingParams
from infer.sampling.grammar import Grammar
from infer.speculation.control.confidence import ExitDecision
from infer.speculation.proposers.levels import StepByStep
from kernels.cpu.library import library
from kernels.draft import NativeChains, NativeTrees
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.heads import make_head

KINDS = {
    "eagle3": ("eagle3", {"draft_vocab_size": 208}),
    "eagle3, whole vocabulary": ("eagle3, norm_before_residual", {}),
    "eagle3.1": ("eagle3.1", {}),
    "eagle3, two layers": ("eagle3, two layers", {"draft_vocab_size": 208}),
    "eagle": ("eagle", {}),
    "eagle, fc with bias": ("eagle, fc with bias", {}),
    "eagle, the target's embedding": ("eagle, the target's embedding", {}),
}
TREES = {
    "beam": {"tree": "beam:3x4:12"},
    "beam of 8": {"tree": "beam:8x5:40"},
    "fixed": {"tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]},
    "only children": {"tree": [[0], [1]]},
}
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")


class Both:
    """Drafts chains in one C call per level and step by step, into the same slots. Differences are noted, since the
    engine would continue without a drafter that raises.
    """

    def __init__(self, native, plain, caches, notes):
        self.native, self.plain, self._caches, self._notes = native, plain, caches, notes

    def draft(self, *, return_log_probs):
        tokens, values = self.native.draft(return_log_probs=return_log_probs)
        copies = [cache.clone() for cache in self._caches]
        plain_tokens, expected = self.plain.draft(return_log_probs=return_log_probs)
        same = tokens == plain_tokens and all(torch.equal(a, b) for a, b in zip(copies, self._caches, strict=True))
        if return_log_probs:
            same = same and values == pytest.approx(expected, abs=1e-3) and max(values) <= 1e-6
        self._notes.append((len(tokens), same))
        return tokens, values

    def keep(self, places):
        self.native.keep(places)
        self.plain.keep(places)


@pytest.fixture(scope="module")
def folder(make_target_folder):
    return make_target_folder(seed=6, num_attention_heads=2, num_key_value_heads=1)  # head size 32, as C needs


def serve(folder, kind, dtype, weights, shape=None, **settings):
    target, (variant, options) = load_target(str(folder)), KINDS[kind]
    head = make_head(target, variant, **options)
    proposer_config = ProposerConfig(name="head", **(shape or {"max_draft_tokens": 4}))
    target = load_target(str(folder), dtype=dtype)
    config = EngineConfig(prefill_chunk=16, max_rows=64, max_batch=8, head_weights=weights, **settings)
    return Engine(
        target,
        head=head.to(dtype),
        proposer="head",
        config=config,
        proposer_config=proposer_config,
        tokenizer=Tokenizer.load(folder),
    )


def compare(engine):
    """Draft every chain in both ways; the list returned gets, per level, the number of chains and whether all agree."""
    proposer, notes = engine._head, []
    assert proposer._native is not None
    levels = proposer._levels

    def both(requests, deepest):
        native = levels(requests, deepest)
        assert isinstance(native, NativeChains)
        saved, proposer._native = proposer._native, None
        plain = levels(requests, deepest)
        proposer._native = saved
        assert isinstance(plain, StepByStep)
        return Both(native, plain, proposer._caches, notes)

    proposer._levels = both
    return notes


class BothTrees:
    """As `Both`, for trees: `run` runs a level's nodes, `children` returns their best children."""

    def __init__(self, native, plain, caches, notes):
        self.native, self.plain, self._caches, self._notes = native, plain, caches, notes

    def children(self, level, fan_out):
        tokens, values = self.native[0](level, fan_out)
        copies = [cache.clone() for cache in self._caches]
        if level > 1:
            self.plain[1](*self._next)
        plain_tokens, expected = self.plain[0](level, fan_out)
        same = torch.equal(tokens, plain_tokens) and torch.equal(values, expected)
        self._notes.append((len(tokens), same and all(map(torch.equal, copies, self._caches))))
        return tokens, values

    def run(self, level, parent, token):
        self._next = level, parent.clone(), token.clone()
        self.native[1](level, parent, token)


def compare_trees(engine):
    """As `compare`, for every level of every tree."""
    proposer, notes = engine._head, []
    assert proposer._native is not None
    growing = proposer._growing

    def both(requests, budgets):
        native = growing(requests, budgets)
        saved, proposer._native = proposer._native, None
        trees = BothTrees(native, growing(requests, budgets), proposer._caches, notes)
        proposer._native = saved
        assert isinstance(native[0].__self__, NativeTrees)
        return trees.children, trees.run

    proposer._growing = both
    return notes


def prompts_of(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 384, (5 + 13 * b,), generator=generator).tolist() for b in range(count)]


def check(engine, compare):
    """Check texts of several lengths, greedy and sampled."""
    prompts = prompts_of(4)
    params = [
        SamplingParams(max_tokens=9 + 3 * b, temperature=0.7 * (b % 2), seed=2**40 + b, ignore_eos=True)
        for b in range(4)
    ]
    engine.set_proposer("none")
    plain = [completion.token_ids for completion in engine.generate(prompts, params)]
    engine.set_proposer("head")
    notes = compare(engine)
    assert [completion.token_ids for completion in engine.generate(prompts, params)] == plain
    assert all(same for _, same in notes)
    assert {count for count, _ in notes} == {1, 2, 3, 4}  # a text that ends leaves the batch to the others
    assert engine.speculator.failures == 0


@pytest.mark.parametrize("weights", ["same", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_in_one_call_it_drafts_the_same_tokens(folder, kind, dtype, weights):
    engine = serve(folder, kind, dtype, weights)
    check(engine, compare)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "threads"),
    [
        *((kind, "beam", torch.float32, 1) for kind in KINDS),
        *((kind, "fixed", torch.bfloat16, 2) for kind in ("eagle3", "eagle3, two layers", "eagle")),
        ("eagle3", "beam of 8", torch.bfloat16, 2),
        ("eagle", "beam of 8", torch.float32, 2),
        ("eagle3", "only children", torch.float32, 1),
    ],
)
def test_in_one_call_a_level_it_grows_the_same_trees(folder, kind, shape, dtype, threads):
    engine = serve(folder, kind, dtype, "int8" if shape == "beam" else "same", TREES[shape], threads=threads)
    check(engine, compare_trees)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights", ["same", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_prompt_only_keys_and_values_are_made_and_they_are_the_same(folder, kind, dtype, weights, threads):
    caches = []
    for native in (True, False):
        engine = serve(folder, kind, dtype, weights, threads=threads)
        proposer = engine._head
        assert proposer._native is not None
        if not native:
            proposer._native = None
        states, run = [], proposer.module.step
        proposer.module.step = lambda *args, states=states, run=run: states.append(args) or run(*args)
        engine.generate(prompts_of(4), SamplingParams(max_tokens=2, ignore_eos=True))
        assert bool(states) is not native
        caches.append([cache.clone() for cache in proposer._caches])
    assert any(cache.any() for cache in caches[0])
    assert all(map(torch.equal, *caches))


@pytest.mark.parametrize("count", [1, 2])
def test_judged_chains_too_which_end_at_any_level(folder, count):
    engine = serve(folder, "eagle3", torch.float32, "same", threads=count)
    notes, verdicts = compare(engine), torch.Generator().manual_seed(1)

    class Judge:
        scoring = True

        def start(self, requests, depths):
            pass

        def score(self, requests, values):
            going = torch.rand(len(requests), generator=verdicts) < 0.7
            return [ExitDecision(True, continue_) for continue_ in going.tolist()]

        def __getattr__(self, name):
            return lambda *args: None

    engine._head.confidence = Judge()
    params = SamplingParams(max_tokens=24, temperature=0.5, seed=5, ignore_eos=True)
    engine.generate(prompts_of(6), params)
    assert all(same for _, same in notes)
    assert {count for count, _ in notes} == {1, 2, 3, 4, 5, 6}
    assert engine.speculator.failures == 0


def test_a_head_that_was_woken_within_a_text(folder):
    engine, bases = serve(folder, "eagle3", torch.float32, "same"), set()
    notes, proposer = compare(engine), engine._head
    engine.speculator._on_admission = lambda request, load: setattr(request, "drafter_state", DrafterState.NONE)
    levels = proposer._levels

    def noted(requests, deepest):
        bases.update(proposer.bases(requests))
        return levels(requests, deepest)

    proposer._levels = noted
    engine.generate(prompts_of(4), SamplingParams(max_tokens=90, ignore_eos=True))
    assert all(same for _, same in notes)
    assert len(bases - {0}) > 1
    assert 4 in {count for count, _ in notes}
    assert engine.speculator.failures == 0


def test_what_looks_at_logits_goes_step_by_step(folder):
    engine = serve(folder, "eagle3", torch.float32, "same")
    kinds, levels = [], engine._head._levels

    def noted(requests, deepest):
        item = levels(requests, deepest)
        kinds.append(type(item))
        return item

    engine._head._levels = noted
    for item, kind in (
        ({}, NativeChains),
        ({"temperature": 1.0}, NativeChains),
        ({"temperature": 1.0, "top_k": 5}, StepByStep),
        ({"temperature": 1.0, "min_p": 0.1}, StepByStep),
        ({"temperature": 1.0, "acceptance": "block"}, StepByStep),
        ({"grammar": Grammar("regex", "(ab)+")}, StepByStep),
    ):
        kinds.clear()
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos="grammar" not in item, **item))
        assert kinds
        assert set(kinds) == {kind}, item
