"""Shared pages change no token: of requests with a common prefix, of several outputs of a prompt, after pre-emption."""

from __future__ import annotations

import pytest
import torch

from infer.request import SamplingParams
from infer.speculation.control.planner import NoDrafts
from tests.heads import WINDOWED
from tests.pairwise import parametrize_each
from tests.pools import check_pool

TOKENS = 16
PAGE = 8
ENGINES = {
    "none": {"proposer": "none"},
    "ngram": {"proposer": "ngram"},
    "head chain": {"proposer": "head"},
    "head tree": {"proposer": "head", "shape": {"tree": "beam:4x4"}},
    "mtp head chain": {"proposer": "head", "head": "mtp"},
    "mtp head tree": {"proposer": "head", "head": "mtp, three modules", "shape": {"tree": "beam:4x4"}},
    "mlp head chain": {"proposer": "head", "head": "mlp"},
    "p-eagle head chain": {"proposer": "head", "head": "p-eagle, one layer"},
    "dflash head chain": {"proposer": "head", "head": "dflash"},
    "dflash2 head tree": {"proposer": "head", "head": "dflash2", "shape": {"tree": "beam:4x4"}},
    "windowed head chain": {"proposer": "head", "head": WINDOWED[0]},
    "windowed head tree": {"proposer": "head", "head": WINDOWED[0], "shape": {"tree": "beam:4x4"}},
    "draft model": {"proposer": "draft_model", "draft_model": "same"},
    "draft model tree": {"proposer": "draft_model", "draft_model": "same", "shape": {"tree": "beam:4x4"}},
    "combined": {
        "proposer": "combined",
        "shape": {"sources": ["suffix", "head", "draft_model"]},
        "draft_model": "other",
    },
}


def make_prompts():
    """Return prompts with common prefixes of lengths around multiples of a page, some of them prefixes of others."""
    generator = torch.Generator().manual_seed(2)
    base = torch.randint(1, 384, (60,), generator=generator).tolist()
    others = torch.randint(1, 384, (40, 9), generator=generator).tolist()
    lengths = [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 31, 32, 33, 60]
    return [base[:length] + others[index] for index, length in enumerate(lengths)] + [base, base[: 4 * PAGE], base]


def params(**overrides):
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 3} | overrides)


@pytest.fixture(scope="module")
def expected(make_engine):
    token_ids = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(dtype, "none", max_batch=1, prefix_cache=False)
        token_ids[dtype] = [engine.generate([prompt], params())[0].token_ids for prompt in make_prompts()]
    return token_ids


def count_prefilled(engine):
    """Return a list that gets the size of every prompt chunk computed from now on."""
    counted = []
    prefill = engine._runner.prefill

    def counting(requests, chunks, aux):
        counted.extend(chunks)
        return prefill(requests, chunks, aux)

    engine._runner.prefill = counting
    return counted


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ENGINES),
        *((name, torch.bfloat16) for name in ("head tree", "combined")),
    ],
)
def test_hits_and_misses_answer_alike(make_engine, expected, name, dtype):
    engine = make_engine(dtype, page_size=PAGE, max_batch=3, **ENGINES[name])
    prompts = make_prompts()
    for _ in range(2):  # the second time nearly all is cached
        rows = count_prefilled(engine)
        completions = engine.generate(prompts, params())
        assert [completion.token_ids for completion in completions] == expected[dtype]
        check_pool(engine._pool, [])
    assert sum(rows) < 0.5 * sum(map(len, prompts))
    if "head" in name:
        first = sum(completion.stats.accepted for completion in completions)
        cold = make_engine(dtype, page_size=PAGE, max_batch=3, prefix_cache=False, **ENGINES[name])
        plain = sum(completion.stats.accepted for completion in cold.generate(prompts, params()))
        assert first == plain, "with known pages a head drafts as well as without"


def test_answers_can_be_continued(make_engine):
    """A conversation: each prompt extends the last one by its output. Pages of verified output are cached too."""
    engine, plain = make_engine(page_size=4), make_engine(page_size=4, prefix_cache=False, proposer="none")
    prompt = make_prompts()[3]
    for turn in range(3):
        rows = count_prefilled(engine)
        (completion,) = engine.generate([prompt], params())
        assert completion.token_ids == plain.generate([prompt], params())[0].token_ids
        if turn:
            assert sum(rows) <= 12
        prompt = prompt + completion.token_ids + [turn + 1]


def test_pre_empted_requests_take_up_what_they_had(make_engine, expected):
    engine = make_engine(page_size=PAGE, max_batch=6, max_tokens_in_cache=200)
    completions = engine.generate(make_prompts(), params())
    assert [completion.token_ids for completion in completions] == expected[torch.float32]
    assert engine.stats.preemptions > 0
    check_pool(engine._pool, [])


def test_an_abort_leaves_no_page_that_is_not_filled(make_engine):
    """The first token ends a page, and would be computed by the next step."""
    engine, plain = make_engine(page_size=PAGE), make_engine(proposer="none", prefix_cache=False)
    for cache in engine._pool.layers.caches:
        cache.fill_(50.0)  # what nobody has written would show
    prompt = make_prompts()[10][: 2 * PAGE - 1]
    name = engine.add(prompt, params())
    (output,) = engine.step()
    engine.abort(name)
    longer = [*prompt, *output.token_ids, 1, 2, 3]
    assert len(output.token_ids) == 1
    assert engine.generate([longer], params())[0].token_ids == plain.generate([longer], params())[0].token_ids


@parametrize_each(
    {
        "name": ["none", "head chain", "head tree", "draft model", "draft model tree"],
        "length": [PAGE + 1, 1, PAGE, 37],
    }
)
def test_answers_to_one_prompt_share_it(make_engine, name, length):
    prompt = make_prompts()[10][:length]
    engine = make_engine(page_size=PAGE, max_batch=8, **ENGINES[name])
    rows = count_prefilled(engine)
    completions = engine.generate([prompt], params(n=5, seed=50))
    assert sum(rows) == length + 4  # the others compute only the prompt's last token
    plain = make_engine(proposer="none", prefix_cache=False)
    for index, completion in enumerate(completions):
        assert completion.token_ids == plain.generate([prompt], params(seed=50 + index))[0].token_ids
    assert len({tuple(completion.token_ids) for completion in completions}) == 5
    check_pool(engine._pool, [])


@pytest.mark.parametrize("name", ["head chain", "p-eagle head chain", "dflash head chain", "combined"])
def test_a_drafter_has_read_the_prompt_whose_pages_are_shared(make_engine, name):
    """Without a draft before, it keeps what it has not read of a short prompt."""
    engine, prompt, read = make_engine(page_size=PAGE, max_batch=8, **ENGINES[name]), make_prompts()[10][:37], []
    engine.speculator.planner, fork = NoDrafts(), engine._pool.fork

    def noted(parent, child):
        read.append(parent.drafter.synced(parent))
        fork(parent, child)

    engine._pool.fork = noted
    engine.generate([prompt], params(n=3))
    assert len(read) == 2
    assert min(read) >= len(prompt) - 1


@pytest.mark.parametrize("name", ["head chain", "head tree", "p-eagle head chain"])
def test_drafts_for_one_prompt_read_nothing_that_its_pages_held_before(make_engine, name):
    drafts = []
    for left in (0.0, 1.0):
        engine, trees = make_engine(page_size=PAGE, max_batch=8, **ENGINES[name]), []
        for cache in engine._pool.layers.caches:
            cache.fill_(left)

        def noted(*args, propose=engine.speculator.propose, trees=trees):
            tree = propose(*args)
            trees.append(tree.token[tree.inside].tolist())
            return tree

        engine.speculator.propose = noted
        engine.generate([make_prompts()[10][:37]], params(n=4))
        drafts.append(trees)
    assert len(drafts[0]) > TOKENS / 5
    assert drafts[0] == drafts[1]


def test_tenants_share_nothing(make_engine):
    engine = make_engine(page_size=PAGE)
    prompt = make_prompts()[-1]
    engine.generate([prompt], params(cache_salt="a"))
    rows = count_prefilled(engine)
    engine.generate([prompt], params(cache_salt="b"))
    assert sum(rows) == len(prompt)
    rows = count_prefilled(engine)
    engine.generate([prompt], params(cache_salt="a"))
    assert sum(rows) < len(prompt) // 2


def test_another_head_finds_no_pages_of_the_last_one(make_engine, tiny_head_folder):
    from models.heads.files import load_head

    engine = make_engine(page_size=PAGE)
    prompt = make_prompts()[-1]
    engine.generate([prompt], params())
    engine.set_proposer("head", load_head(tiny_head_folder))
    rows = count_prefilled(engine)
    engine.generate([prompt], params())
    assert sum(rows) == len(prompt)


def test_a_prompt_of_one_token_has_no_logprobs(make_engine):
    engine = make_engine(max_batch=2)
    for prompt, count in (([5], 0), ([5, 6], 1)):
        (completion,) = engine.generate([prompt], params(prompt_logprobs=2))
        assert (completion.finish_reason, len(completion.prompt_logprobs)) == ("length", count)


def test_prompt_logprobs_need_every_row(make_engine):
    engine = make_engine(page_size=PAGE)
    prompt = make_prompts()[-1]
    engine.generate([prompt], params())
    (completion,) = engine.generate([prompt], params(prompt_logprobs=0))
    assert len(completion.prompt_logprobs) == len(prompt) - 1
