"""Drafting a level of a chain or a tree in one C call gives the drafts, keys and values of the head's operations."""

from __future__ import annotations

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import DrafterState, SamplingParams
from infer.sampling.grammar import Grammar
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.confidence import Confidence
from infer.speculation.draft_loop import NativeLoop, TorchLoop
from infer.speculation.early_exit import HostExit
from kernels.cpu.library import library
from kernels.early_exit import Drafting
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.heads import make_head
from tests.pairwise import parametrize_pairs

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
    """Drafts by C and then by the head's own operations, from the same rows into the same slots. Differences are noted,
    since the engine would continue without a drafter that raises.
    """

    def __init__(self, proposer, notes):
        self._native, self._plain, self._pool, self._notes = proposer._native, proposer.loop, proposer._pool, notes
        self._caches = self._native._caches
        assert isinstance(self._native, NativeLoop)
        assert isinstance(self._plain, TorchLoop)

    def read(self, unread):
        self._native.read(unread)

    def chain(self, unread, depths, deepest, early_exit=None):
        decisions = None if early_exit is None else Decisions(early_exit)
        drafted = self._native.chain(unread, depths, deepest, decisions)
        slots = self._slots_of(unread, drafted.length)
        copies = [cache[:, :, slots].clone() for cache in self._caches]
        for cache in self._caches:
            cache[:, :, slots] = 0
        again = self._plain.chain(unread, depths, deepest, decisions)
        same = torch.equal(drafted.length, again.length) and (decisions is None or decisions.agree)
        for row, count in enumerate(drafted.length.tolist()):
            same = same and torch.equal(drafted.token[row, :count], again.token[row, :count])
        same = same and all(torch.equal(a, b[:, :, slots]) for a, b in zip(copies, self._caches, strict=True))
        counts = [int((drafted.length > level).sum()) for level in range(deepest)]
        self._notes += [(count, same) for count in counts if count]
        return drafted

    def _slots_of(self, unread, length):
        """Return the slots of the unread rows, and of the drafted tokens that were run."""
        slots = [unread.rows.slots]
        for row, count in enumerate(length.tolist()):
            places = torch.arange(1, max(count, 1)) + unread.root[row] - unread.base[row]
            page = unread.rows.table[unread.requests[row], places // self._pool.page_size]
            slots.append(page * self._pool.page_size + places % self._pool.page_size)
        return torch.cat(slots)

    def tree(self, unread, shape, deepest):
        grown = self._native.tree(unread, shape, deepest)
        copies = [cache.clone() for cache in self._caches]
        again = self._plain.tree(unread, shape, deepest)
        same = all(map(torch.equal, grown, again)) and all(map(torch.equal, copies, self._caches))
        self._notes.append((len(unread.root), same))
        return grown


class Decisions:
    """An early exit that decides once, and then as it did before; the log-probabilities must then be the same too."""

    on_host, agree = True, True

    def __init__(self, early_exit):
        self._early_exit, self._levels = early_exit, []

    def decide(self, level, values, active):
        decided = self._early_exit.decide(level, values, active)
        self._levels.append((active, values, decided))
        return decided

    def __call__(self, level, log_probs, chains, depths):
        rows, values, decided = self._levels[level]
        self.agree = self.agree and chains.active.nonzero()[:, 0].tolist() == rows and max(values) <= 1e-6
        self.agree = self.agree and log_probs[rows].tolist() == pytest.approx(values, abs=1e-3)
        both = torch.zeros(2, len(depths), dtype=torch.bool)
        both[:, rows] = torch.tensor(decided)
        return Drafting(both[1] & (depths > level + 1), chains.length + both[0], chains.chance)


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
    """Draft everything in both ways; the list returned gets, per level or tree, the number of requests and whether all
    agree.
    """
    notes = []
    engine._head._native = Both(engine._head, notes)
    return notes


def prompts_of(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 384, (5 + 13 * b,), generator=generator).tolist() for b in range(count)]


def check(engine):
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


@parametrize_pairs({"kind": list(KINDS), "dtype": [torch.float32, torch.bfloat16], "weights": ["same", "int8", "q8_0"]})
def test_in_one_call_it_drafts_the_same_tokens(folder, kind, dtype, weights):
    engine = serve(folder, kind, dtype, weights)
    check(engine)


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
    check(engine)


@parametrize_pairs(
    {
        "kind": list(KINDS),
        "dtype": [torch.float32, torch.bfloat16],
        "weights": ["same", "int8"],
        "threads": [1, 2],
    }
)
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
        caches.append([cache.clone() for cache in proposer._pool.layers.caches[proposer._first_layer :]])
    assert any(cache.any() for cache in caches[0])
    assert all(map(torch.equal, *caches))


@pytest.mark.parametrize("count", [1, 2])
def test_judged_chains_too_which_end_at_any_level(folder, monkeypatch, count):
    engine = serve(folder, "eagle3", torch.float32, "same", threads=count)
    notes, verdicts = compare(engine), torch.Generator().manual_seed(1)

    class Judge(HostExit):
        def decide(self, level, values, active):
            return [True] * len(active), (torch.rand(len(active), generator=verdicts) < 0.7).tolist()

    monkeypatch.setattr("infer.speculation.proposers.head.HostExit", Judge)
    engine._head.confidence = Confidence(AcceptanceModel())
    params = SamplingParams(max_tokens=24, temperature=0.5, seed=5, ignore_eos=True)
    engine.generate(prompts_of(6), params)
    assert all(same for _, same in notes)
    assert {count for count, _ in notes} == {1, 2, 3, 4, 5, 6}
    assert engine.speculator.failures == 0


def test_a_head_that_was_woken_within_a_text(folder):
    engine, bases = serve(folder, "eagle3", torch.float32, "same"), set()
    notes, proposer = compare(engine), engine._head
    engine.speculator._on_admission = lambda request, load: setattr(request, "drafter_state", DrafterState.NONE)
    unread_rows = proposer._unread_rows

    def noted(requests, **options):
        bases.update(proposer.bases(requests))
        return unread_rows(requests, **options)

    proposer._unread_rows = noted
    engine.generate(prompts_of(4), SamplingParams(max_tokens=90, ignore_eos=True))
    assert all(same for _, same in notes)
    assert len(bases - {0}) > 1
    assert 4 in {count for count, _ in notes}
    assert engine.speculator.failures == 0


def test_what_looks_at_logits_goes_step_by_step(folder):
    engine = serve(folder, "eagle3", torch.float32, "same")
    kinds = []
    for loop in (engine._head._native, engine._head.loop):
        chain, kind = loop.chain, type(loop)
        loop.chain = lambda *args, chain=chain, kind=kind: (kinds.append(kind), chain(*args))[1]
    for item, kind in (
        ({}, NativeLoop),
        ({"temperature": 1.0}, NativeLoop),
        ({"temperature": 1.0, "top_k": 5}, TorchLoop),
        ({"temperature": 1.0, "min_p": 0.1}, TorchLoop),
        ({"temperature": 1.0, "acceptance": "block"}, TorchLoop),
        ({"grammar": Grammar("regex", "(ab)+")}, TorchLoop),
    ):
        kinds.clear()
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos="grammar" not in item, **item))
        assert kinds
        assert set(kinds) == {kind}, item
