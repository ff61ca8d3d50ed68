"""Drafting a level of a chain or a tree in one C call gives the drafts, keys and values of the head's operations."""

from __future__ import annotations

import pytest
import torch

from infer.batch.grammar import Grammar
from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import DrafterState, SamplingParams
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.confidence import Confidence
from kernels.cpu.library import library
from kernels.draft import NativeChains
from kernels.operands import Drafting
from models.targets import load_target
from models.tokenizer import Tokenizer
from tests.heads import make_head
from tests.pairwise import parametrize_each
from tests.unit.test_families import make_family_folder  # noqa: F401  a fixture

KINDS = {
    "eagle3": ("eagle3", {"draft_vocab_size": 208}),
    "eagle3, whole vocabulary": ("eagle3, norm_before_residual", {}),
    "eagle3.1": ("eagle3.1", {}),
    "eagle3, two layers": ("eagle3, two layers", {"draft_vocab_size": 208}),
    "eagle3, windows": ("eagle3, windows of Qwen3's layers", {"draft_vocab_size": 208, "window": 5}),
    "eagle": ("eagle", {}),
    "eagle, fc with bias": ("eagle, fc with bias", {}),
    "eagle, the target's embedding": ("eagle, the target's embedding", {}),
    "mtp": ("mtp", {}),
    "mtp, hidden first, centered norms": ("mtp, hidden first, centered norms", {}),
    "mtp, states before norms": ("mtp, states before norms", {"centered_norms": True, "zero_first": True}),
}
TREES = {
    "beam": {"tree": "beam:3x4:12"},
    "beam of 8": {"tree": "beam:8x5:40"},
    "fixed": {"tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]},
    "only children": {"tree": [[0], [1]]},
}
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")


class Both:
    """Makes a loop draft by C and then by the head's own operations, from the same rows into the same slots.
    Differences are noted, since the engine would continue without a drafter that raises.
    """

    def __init__(self, proposer, notes):
        self._loop, self._pool, self._notes = proposer.loop, proposer._pool, notes
        self._native, self._caches = self._loop.native, self._loop.native[1]
        self._chain, self._tree = self._loop.chain, self._loop.tree
        self._loop.chain, self._loop.tree = self.chain, self.tree

    def _plain(self, draft, *args):
        self._loop.native = None
        try:
            return draft(*args)
        finally:
            self._loop.native = self._native

    def chain(self, unread, depths, deepest, early_exit=None, adjust=None):
        assert adjust is None
        decisions = early_exit and Decisions(early_exit)
        drafted = self._chain(unread, depths, deepest, decisions)
        slots = self._slots_of(unread, drafted.length)
        copies = [cache[:, :, slots].clone() for cache in self._caches]
        for cache in self._caches:
            cache[:, :, slots] = 0
        again = self._plain(self._chain, unread, depths, deepest, decisions and decisions.again())
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
        grown = self._tree(unread, shape, deepest)
        copies = [cache.clone() for cache in self._caches]
        again = self._plain(self._tree, unread, shape, deepest)
        same = all(map(torch.equal, grown, again)) and all(map(torch.equal, copies, self._caches))
        self._notes.append((len(unread.root), same))
        return grown


class Decisions:
    """An early exit that decides once, and then as it did before; the log-probabilities must then be the same too."""

    agree = True

    def __init__(self, early_exit):
        self._early_exit, self._levels, self._decided = early_exit, [], False
        self.chains = early_exit.chains

    def again(self):
        self._decided, self.chains = True, self._levels[0][0]
        return self

    def after(self, level, log_probs):
        values = torch.as_tensor(log_probs).tolist()
        if not self._decided:
            before, goes_on = self.chains, self._early_exit.after(level, log_probs)
            self.chains = self._early_exit.chains
            self._levels.append((before, self.chains, values, goes_on))
            return goes_on
        before, after, decided, goes_on = self._levels[level]
        pairs = [(values[row], decided[row]) for row, active in enumerate(before.active) if active]
        self.agree = self.agree and all(a == pytest.approx(b, abs=1e-3) and b <= 1e-6 for a, b in pairs)
        self.chains = after
        return goes_on

    @property
    def lengths(self):
        return torch.as_tensor(self.chains.length)


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
        tokenizer=Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None,
    )


def compare(engine):
    """Draft everything in both ways; the list returned gets, per level or tree, the number of requests and whether all
    agree.
    """
    notes = []
    Both(engine._head, notes)
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


@parametrize_each({"kind": list(KINDS), "weights": ["same", "int8", "q8_0"], "dtype": [torch.float32, torch.bfloat16]})
def test_in_one_call_it_drafts_the_same_tokens(folder, kind, dtype, weights):
    engine = serve(folder, kind, dtype, weights)
    check(engine)


@pytest.mark.parametrize(("kind", "shape"), [("eagle", None), ("mtp", None), ("mtp", "beam")])
def test_so_does_a_head_that_gates_attention_and_rotates_half_of_each_head(make_family_folder, kind, shape):  # noqa: F811
    engine = serve(make_family_folder("qwen3.5"), kind, torch.bfloat16, "same", TREES[shape] if shape else None)
    assert engine._head.loop.native is not None
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


@parametrize_each(
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
        assert proposer.loop.native is not None
        if not native:
            proposer.loop.native = None
        states, run = [], proposer.module.step
        proposer.module.step = lambda *args, states=states, run=run: states.append(args) or run(*args)
        engine.generate(prompts_of(4), SamplingParams(max_tokens=2, ignore_eos=True))
        assert bool(states) is not native
        caches.append([cache.clone() for cache in proposer._pool.layers.caches[proposer.first_layer :]])
    assert any(cache.any() for cache in caches[0])
    assert all(map(torch.equal, *caches))


@pytest.mark.parametrize("count", [1, 2])
def test_judged_chains_too_which_end_at_any_level(folder, monkeypatch, count):
    engine = serve(folder, "eagle3", torch.float32, "same", threads=count)
    notes, verdicts = compare(engine), torch.Generator().manual_seed(1)

    def judge(chains, terms, depths, log_probs, level, least):
        goes_on = (torch.rand(len(depths), generator=verdicts) < 0.7).tolist()
        active = [a and b and depth > level + 1 for a, b, depth in zip(chains.active, goes_on, depths, strict=True)]
        length = [count + kept for count, kept in zip(chains.length, chains.active, strict=True)]
        return Drafting(active, length, chains.chance)

    monkeypatch.setattr("infer.speculation.proposers.draft_loops.early_exit.exit_level", judge)
    engine._head.confidence = Confidence(AcceptanceModel())
    params = SamplingParams(max_tokens=24, temperature=0.5, seed=5, ignore_eos=True)
    engine.generate(prompts_of(6), params)
    assert all(same for _, same in notes)
    assert {count for count, _ in notes} == {1, 2, 3, 4, 5, 6}
    assert engine.speculator.failures == 0


def test_a_head_that_was_woken_within_a_text(folder):
    engine, bases = serve(folder, "eagle3", torch.float32, "same"), set()
    notes, proposer = compare(engine), engine._head
    engine.speculator._decide_state = lambda request, load: setattr(request.drafter, "state", DrafterState.NONE)
    unread_rows = proposer._unread_rows

    def noted(requests, states, *depth):
        bases.update(state.base for state in states)
        return unread_rows(requests, states, *depth)

    proposer._unread_rows = noted
    engine.generate(prompts_of(4), SamplingParams(max_tokens=90, ignore_eos=True))
    assert all(same for _, same in notes)
    assert len(bases - {0}) > 1
    assert 4 in {count for count, _ in notes}
    assert engine.speculator.failures == 0


def test_what_lies_before_a_start_within_a_text_is_not_read(folder):
    drafted = []
    for left in (0.0, 1.0):  # in the head's pages, by other requests
        engine = serve(folder, "eagle3", torch.float32, "same", threads=1)
        engine.speculator._decide_state = lambda request, load: setattr(request.drafter, "state", DrafterState.NONE)
        proposer, drafts = engine._head, []
        for cache in proposer._pool.layers.caches[proposer.first_layer :]:
            cache.fill_(left)

        def noted(*args, chain=proposer.loop.chain, drafts=drafts):
            drafts.append(chain(*args).token.tolist())
            return chain(*args)

        proposer.loop.chain = noted
        engine.generate(prompts_of(1), SamplingParams(max_tokens=90, ignore_eos=True))
        drafted.append(drafts)
    assert len(drafted[0]) > 5
    assert drafted[0] == drafted[1]


def test_a_chain_leaves_the_batch_at_its_own_limit(folder, monkeypatch):
    engine, counts, draft = serve(folder, "eagle3", torch.float32, "same"), [], NativeChains.draft

    def counted(levels, **options):
        counts.append(levels._chains)
        return draft(levels, **options)

    monkeypatch.setattr(NativeChains, "draft", counted)
    params = [SamplingParams(max_tokens=20, max_draft_tokens=1 + b, ignore_eos=True) for b in range(4)]
    engine.generate([[5, 6, 7 + b] for b in range(4)], params)
    assert counts[:8] == [4, 3, 2, 1, 4, 3, 2, 1]


def test_what_looks_at_logits_goes_step_by_step(folder, monkeypatch):
    engine, calls = serve(folder, "eagle3", torch.float32, "same"), []
    draft = NativeChains.draft
    monkeypatch.setattr(NativeChains, "draft", lambda *args, **options: (calls.append(1), draft(*args, **options))[1])
    for item, in_one_call in (
        ({}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "top_k": 5}, False),
        ({"temperature": 1.0, "min_p": 0.1}, False),
        ({"temperature": 1.0, "acceptance": "block"}, False),
        ({"grammar": Grammar("regex", "(ab)+")}, False),
    ):
        calls.clear()
        (completion,) = engine.generate(
            [[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos="grammar" not in item, **item)
        )
        assert bool(calls) is in_one_call, item
        assert completion.stats.drafted > 0
