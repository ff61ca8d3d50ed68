"""Hybrid targets: drafts, batches, cuts of prompts, cached prefixes and pre-emption change no bit of a state."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from infer.batch.tree import Budget
from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.engine.startup.profiled_engine import ProfiledEngine
from infer.kvcache.hybrid import HybridPool
from infer.kvcache.memory import plan_memory
from infer.request import Phase, SamplingParams
from models.targets import load_target
from tests.lossless.oracles import Scripted, Thicket, WrongThenRight
from tests.lossless.plain import Plain, answer_all
from tests.pairwise import parametrize_pairs
from tests.pools import check_pool
from tests.unit.test_families import make_family_folder  # noqa: F401  a fixture

HYBRIDS = ["lfm2", "qwen3.5", "granite hybrid", "falcon h1", "nemotron h with experts", "qwen3 next"]
DTYPES = [torch.float32, torch.bfloat16]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0)
SAMPLED = replace(GREEDY, temperature=0.9, top_k=60, seed=7)
CUTS = [1, 3, 16, 63, 64, 65, 256]
DRAFTS = {
    "none": None,
    "wrong then right": Budget(4, 4),
    "thicket": Budget(16, 6),
    "large thicket": Budget(60, 9),
    "ngram": None,
    "suffix": None,
}


def make_prompts() -> list[list[int]]:
    """Shorter and longer than windows, pages and chunks; some share a prefix, and some are equal."""
    generator = torch.Generator().manual_seed(5)
    base = torch.randint(1, 384, (80,), generator=generator).tolist()
    others = torch.randint(1, 384, (8, 5), generator=generator).tolist()
    prompts = [base[:length] + others[index] for index, length in enumerate((0, 15, 16, 17, 48, 70))]
    return [*prompts, [7], base, base, base[:64], [5, 6, 7] * 12]


@pytest.fixture(scope="module")
def make_engine(make_family_folder):  # noqa: F811
    def make(name, dtype, drafts="none", answer_of=None, **config):
        target = load_target(str(make_family_folder(name)), dtype=dtype)
        limit = DRAFTS.get(drafts)
        proposer = ProposerConfig(name="auto", adaptive=False)
        first = "none" if limit else drafts
        engine = Engine(target, proposer=first, config=EngineConfig(**config), proposer_config=proposer)
        if limit is not None:
            oracle = Thicket(answer_of, seed=3) if "thicket" in drafts else WrongThenRight(answer_of)
            engine.add_proposer(oracle, limit)
        return engine

    return make


@pytest.fixture(scope="module")
def plain(make_engine):
    """`plain(name, dtype)`: plain decoding of one request at a time, its prompt in one chunk."""
    made = {}

    def get(name, dtype):
        key = name, dtype
        if key not in made:
            made[key] = Plain(make_engine(name, dtype, max_batch=1, prefix_cache=False))
        return made[key]

    return get


@parametrize_pairs(
    {
        "name": HYBRIDS,
        "dtype": DTYPES,
        "drafts": list(DRAFTS),
        "params": [GREEDY, SAMPLED],
        "cut": CUTS,
        "batch": [1, 3, 8],
        "cached": [True, False],
        "short_of_pages": [True, False],
    }
)
def test_every_way_to_serve_gives_the_bits_of_plain_decoding(
    make_engine, plain, name, dtype, drafts, params, cut, batch, cached, short_of_pages
):
    oracle = plain(name, dtype)
    pages = {"max_tokens_in_cache": 176 if short_of_pages else 4096}
    config = {"max_batch": batch, "prefix_cache": cached, "prefill_chunk": cut, "max_rows": 512}

    def answer_of(request):
        return oracle(request.prompt_ids, request.params).token_ids

    engine = make_engine(name, dtype, drafts, answer_of, **config, **pages)
    requests = [(prompt, params) for prompt in make_prompts()]
    for (prompt, _), answer in zip(requests, answer_all(engine, requests, range(0, 40, 4)), strict=True):
        assert answer == oracle(prompt, params)
    stats = engine.stats
    if cached:
        assert stats.cached_tokens > 0
    if short_of_pages and batch == 8:
        assert stats.preemptions > 0
    if DRAFTS[drafts]:
        assert 0 < stats.speculation.accepted < stats.speculation.drafted
    check_pool(engine._pool, [])
    assert_no_snapshot_is_lost(engine._pool)


def assert_no_snapshot_is_lost(pool: HybridPool) -> None:
    snapshots = pool.snapshots
    slots = [*snapshots._free, *snapshots._slot_of.values()]
    assert sorted(slots) == list(range(pool.null_row + 1, pool.layers.windows.shape[1]))


def states(engine: Engine, slot: int) -> list[torch.Tensor]:
    return [tensor[:, slot].clone() for tensor in engine._pool.layers._tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafts", ["wrong then right", "large thicket"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_after_every_step_the_states_are_those_of_plain_decoding(make_engine, plain, name, dtype, drafts):
    """Whatever was accepted: nothing, a part, all of a chain; and no other slot is touched, nor the null row's."""
    prompt, params = make_prompts()[4], replace(GREEDY, max_tokens=40)
    wanted, engine = {}, make_engine(name, dtype, max_batch=1, prefix_cache=False)
    engine.add(prompt, params, request_id="plain")
    while engine.has_work:
        request = engine.request("plain")
        engine.step()
        wanted[request.computed] = states(engine, 0)
    oracle, lengths = plain(name, dtype), set()
    engine = make_engine(name, dtype, drafts, lambda request: oracle(prompt, params).token_ids, max_batch=3)
    junk = [torch.randn_like(tensor[:, 0]) for tensor in engine._pool.layers._tensors]
    for slot in range(engine._pool.layers.windows.shape[1]):
        for tensor, values in zip(engine._pool.layers._tensors, junk, strict=True):
            tensor[:, slot] = values
    engine.add(prompt, params, request_id="drafted")
    request = engine.request("drafted")
    while engine.has_work:
        before = request.computed
        engine.step()
        if request.phase is Phase.DECODE:
            lengths.add(request.computed - before)
            for state, same in zip(states(engine, request.table_row), wanted[request.computed], strict=True):
                assert torch.equal(state, same)
    assert len(lengths) >= 3
    for slot in (1, 2, engine._pool.null_row):
        assert all(torch.equal(state, values) for state, values in zip(states(engine, slot), junk, strict=True))


@pytest.mark.parametrize("name", HYBRIDS)
def test_snapshots(make_engine, plain, name):
    """A second turn begins at the last full page of the first one, and a shared prefix is found from its third use on.

    With fewer slots than pages the least recently used snapshot goes first.
    """
    engine, oracle = make_engine(name, torch.float32, "ngram", max_batch=2), plain(name, torch.float32)
    prompt = make_prompts()[7]
    (first,) = answer_all(engine, [(prompt, GREEDY)])
    text = prompt + first.token_ids
    (second,) = answer_all(engine, [([*text, 9, 9], GREEDY)])
    assert second == oracle([*text, 9, 9], GREEDY)
    assert engine.stats.cached_tokens == (len(text) - 2) // 16 * 16
    for count, tail in enumerate(([1, 2, 3], [3, 2, 1], [2, 2, 2])):
        before = engine.stats.cached_tokens
        (answer,) = answer_all(engine, [(prompt[:40] + tail * 20, GREEDY)])
        assert answer == oracle(prompt[:40] + tail * 20, GREEDY)
        assert engine.stats.cached_tokens - before == (32 if count else 0)


def test_a_snapshot_is_taken_inside_an_accepted_path(make_engine, plain):
    """Where a page ends within it; of an answer at most what its last step emitted must be computed again."""
    oracle, prompt = plain("qwen3.5", torch.float32), make_prompts()[7]

    def answer_of(request):
        return oracle(request.prompt_ids, request.params).token_ids

    for tokens in range(40, 56, 3):
        engine = make_engine("qwen3.5", torch.float32, "wrong then right", answer_of, max_batch=1)
        params = replace(GREEDY, max_tokens=tokens)
        (first,) = answer_all(engine, [(prompt, params)])
        text = [*prompt, *first.token_ids, 9, 9]
        (second,) = answer_all(engine, [(text, params)])
        assert second == oracle(text, params)
        assert engine.stats.cached_tokens >= (len(text) - 3 - 5) // 16 * 16


@pytest.mark.parametrize("name", HYBRIDS)
def test_several_outputs_of_one_prompt(make_engine, plain, name):
    engine, oracle = make_engine(name, torch.float32, "ngram", max_batch=4), plain(name, torch.float32)
    for prompt in make_prompts()[4:8]:
        params = replace(SAMPLED, n=3)
        completions = engine.generate([prompt], params)
        for completion in completions:
            alone = replace(SAMPLED, seed=completion.seed)
            assert completion.token_ids == oracle(prompt, alone).token_ids


CHAIN, TREE, PLAIN = "chain", "tree", None
TURNS = {  # kind, right levels and levels of each step's draft
    "from drafted to plain and back": [(CHAIN, 2, 4), PLAIN, (CHAIN, 4, 4), PLAIN, PLAIN, (TREE, 1, 3), PLAIN],
    "a tree after a chain and a chain after a tree": [(CHAIN, 3, 4), (TREE, 2, 4), (CHAIN, 1, 2)],
    "zero accepted": [(CHAIN, 0, 4), (TREE, 0, 3)],
    "all accepted": [(CHAIN, 4, 4), (TREE, 5, 5)],
}


@pytest.fixture(scope="module")
def plain_states(make_engine):
    """`plain_states(name)`: the output of plain decoding, and the states by the number of computed positions."""

    @cache
    def get(name):
        engine, after = make_engine(name, torch.float32, max_batch=1, prefix_cache=False), {}
        engine.add(make_prompts()[7], replace(GREEDY, max_tokens=40), request_id="plain")
        request = engine.request("plain")
        while engine.has_work:
            engine.step()
            after[request.computed] = states(engine, 0)
        return request.output_ids, after

    return get


def scripted(make_engine, answer, name, turns):
    engine = make_engine(name, torch.float32, max_batch=2)
    engine.add_proposer(Scripted(lambda request: answer, turns), Budget(12, 6))
    return engine


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "granite hybrid"])
def test_steps_in_turn(make_engine, plain_states, name, turns):
    """Each step accepts what it should, and leaves the states of plain decoding."""
    answer, after = plain_states(name)
    engine = scripted(make_engine, answer, name, TURNS[turns])
    engine.add(make_prompts()[7], replace(GREEDY, max_tokens=40), request_id="a")
    request, step = engine.request("a"), 0
    while engine.has_work:
        before, decoding = len(request.tokens), request.phase is Phase.DECODE
        engine.step()
        if request.phase is Phase.DECODE:
            for state, wanted in zip(states(engine, request.table_row), after[request.computed], strict=True):
                assert torch.equal(state, wanted)
        if decoding and engine.has_work:
            turn = TURNS[turns][step % len(TURNS[turns])]
            assert len(request.tokens) - before == 1 + (turn[1] if turn else 0)
            step += 1
    assert request.output_ids == answer
    assert step > 3


@pytest.mark.parametrize("kind", [CHAIN, TREE])
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "granite hybrid"])
def test_an_end_inside_an_accepted_path(make_engine, plain, plain_states, name, kind):
    """What was accepted past the end is in no state that a later text begins with."""
    answer, _ = plain_states(name)
    prompt, params, oracle = make_prompts()[7], replace(GREEDY, max_tokens=40), plain(name, torch.float32)
    for end in (12, 15, 16, 17):  # before and after the end of a page
        params = replace(GREEDY, max_tokens=40, stop_token_ids=(answer[end],))
        length = answer.index(answer[end]) + 1
        engine = scripted(make_engine, answer, name, [(kind, 6, 6)])
        (first,) = answer_all(engine, [(prompt, params)])
        assert first.token_ids == answer[:length]
        text = [*prompt, *first.token_ids, *([] if end % 2 else [8])]
        (second,) = answer_all(engine, [(text, replace(GREEDY, speculate=False))])
        assert second == oracle(text, GREEDY)
        assert engine.stats.cached_tokens >= 64


def test_the_profile_of_a_verify_includes_its_replay(make_engine):
    """As if all were accepted; a plain step has none."""
    engine, replayed = make_engine("qwen3.5", torch.float32, max_batch=2), list[int]()
    replay = engine._pool.layers.replay
    engine._pool.layers.replay = lambda paths: (replayed.append(sum(map(len, paths))), replay(paths))[1]
    profiled = ProfiledEngine(engine)
    with profiled.decoding(make_prompts()[2:4], GREEDY) as requests:
        for drafts, rows in ((0, 0), (3, 8), (1, 4)):
            replayed.clear()
            profiled.verify(requests, drafts)
            assert sum(replayed) == rows


def test_memory_of_states_is_planned(make_engine):
    """They are no part of the KV cache, whose tokens cost as many layers as have attention."""
    engine = make_engine("qwen3.5", torch.bfloat16, max_batch=4, max_tokens_in_cache=512)
    layers, plan = engine._pool.layers, engine.memory
    assert plan.states.bytes == sum(tensor.numel() * tensor.element_size() for tensor in layers._tensors)
    assert len(layers.caches) == 2
    assert "states" in str(plan)
    with pytest.raises(ValueError, match=r"the \d+ states for engine.max_batch \d+ MiB"):
        plan_memory(
            engine.config, [engine.target.config], engine._shard.layer_shapes, torch.bfloat16,
            sizes=engine.sizes, weights=0, free=2**20,
        )  # fmt: skip
