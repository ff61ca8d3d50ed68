"""Token ids are the same with speculation on or off, for any proposer, batch, order of arrival and cache size."""

from __future__ import annotations

import pytest
import torch

from infer.batch.tree import Budget
from infer.config import EngineConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.targets import load_target
from tests.heads import ONE_OF_EACH
from tests.lossless.oracles import WrongThenRight
from tests.lossless.plain import GREEDY, SAMPLED, ids
from tests.pairwise import parametrize_pairs
from tests.pools import check_pool


@parametrize_pairs({"proposer": ["none", "ngram", "head"], "batch": [8, 1], "dtype": [torch.float32, torch.bfloat16]})
def test_on_and_off_in_any_batch(make_engine, prompts, expected, dtype, proposer, batch):
    engine = make_engine(dtype, proposer, max_batch=batch)
    for params in (GREEDY, SAMPLED):
        completions = engine.generate(prompts, params)
        assert ids(completions) == expected[dtype, params]
        drafted = sum(completion.stats.drafted for completion in completions)
        accepted = sum(completion.stats.accepted for completion in completions)
        if proposer == "none":
            assert drafted == 0
        elif params is GREEDY:
            assert accepted > 0, "nothing was accepted, so nothing was tested"
        if proposer == "head" or (proposer == "ngram" and params is GREEDY):
            assert drafted > 0
            assert accepted < drafted, "nothing was rejected, so nothing was tested"


@pytest.mark.parametrize(
    ("head", "dtype", "params"),
    [
        *((head, torch.float32, (GREEDY, SAMPLED)[index % 2]) for index, head in enumerate(ONE_OF_EACH)),
        *((head, torch.bfloat16, (SAMPLED, GREEDY)[index % 2]) for index, head in enumerate(ONE_OF_EACH[1::3])),
    ],
)
def test_every_head(make_engine, prompts, expected, head, dtype, params):
    """Chunks, pages and memory are such that all state of a head is read late, moved, and recomputed."""
    engine = make_engine(dtype, head=head, max_batch=8, prefill_chunk=50, max_rows=90, max_tokens_in_cache=400)
    completions = engine.generate(prompts, params)
    assert ids(completions) == expected[dtype, params]
    stats = [completion.stats for completion in completions]
    assert 0 < sum(stat.accepted for stat in stats) < sum(stat.drafted for stat in stats)
    if params is GREEDY:
        assert sum(stat.emitted for stat in stats) / sum(stat.steps for stat in stats) > 1.3
    assert engine.stats.preemptions > 0
    check_pool(engine._pool, [])


@pytest.mark.parametrize("drafts", [1, 2, 7, 20])
def test_any_draft_length(make_engine, prompts, expected, drafts):
    engine = make_engine(proposer="head", drafts=drafts)
    assert ids(engine.generate(prompts, GREEDY)) == expected[torch.float32, GREEDY]
    assert ids(engine.generate(prompts, SAMPLED)) == expected[torch.float32, SAMPLED]


@pytest.mark.parametrize("proposer", ["none", "ngram", "head"])
def test_chunk_size_does_not_show(make_engine, prompts, expected, proposer):
    engine = make_engine(proposer=proposer, prefill_chunk=13, max_rows=50)
    assert ids(engine.generate(prompts, GREEDY)) == expected[torch.float32, GREEDY]


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_size_does_not_show(make_engine, prompts, expected, page_size):
    engine = make_engine(page_size=page_size)
    assert ids(engine.generate(prompts, SAMPLED)) == expected[torch.float32, SAMPLED]


@pytest.mark.parametrize("proposer", ["none", "ngram", "head"])
def test_pre_emption_does_not_show(make_engine, prompts, expected, proposer):
    engine = make_engine(proposer=proposer, max_batch=8, max_tokens_in_cache=384)
    for params in (GREEDY, SAMPLED):
        assert ids(engine.generate(prompts, params)) == expected[torch.float32, params]
    assert engine.stats.preemptions > 0
    check_pool(engine._pool, [])


def test_order_and_time_of_arrival_do_not_show(make_engine, prompts, expected):
    engine = make_engine(max_batch=4)
    order = [6, 0, 10, 3, 8, 1, 9, 2, 7, 5, 4]
    params = {index: (GREEDY if index % 2 else SAMPLED) for index in order}  # greedy and sampled share a batch
    texts: dict[str, list[int]] = {}
    waiting = list(order)
    steps = 0
    while waiting or engine.has_work:
        if waiting and steps % 3 == 0:
            index = waiting.pop()
            engine.add(prompts[index], params[index], request_id=str(index))
        for output in engine.step():
            texts.setdefault(output.request_id, []).extend(output.token_ids)
        steps += 1
    for index in order:
        assert texts[str(index)] == expected[torch.float32, params[index]][index]


def test_seeds_tell_requests_apart_and_are_returned(make_engine, prompts):
    engine = make_engine()
    unseeded = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    first, second = engine.generate([prompts[5]] * 2, unseeded)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    seeded = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, seed=first.seed)
    assert engine.generate([prompts[5]], seeded)[0].token_ids == first.token_ids


@pytest.mark.parametrize(("dtype", "params"), [(torch.float32, SAMPLED), (torch.bfloat16, GREEDY)])
def test_every_length_of_accepted_run(make_engine, prompts, expected, dtype, params):
    responses = {tuple(p): a for p, a in zip(prompts, expected[dtype, params], strict=True)}
    engine = make_engine(dtype, "ngram", drafts=9, max_batch=5)
    engine.add_proposer(WrongThenRight(lambda request: responses[tuple(request.prompt_ids)]), Budget(9, 9))
    completions = engine.generate(prompts, params)
    assert ids(completions) == expected[dtype, params]
    stats = engine.stats.speculation
    assert all(0 < a < d for a, d in zip(stats.accepted_by_position, stats.drafted_by_position, strict=True))
    assert len(stats.accepted_by_position) == 9


def test_what_follows_a_stop_is_cut_and_not_counted(make_engine, prompts, expected):
    answer = expected[torch.float32, GREEDY][5]
    stop = answer[12]
    end = answer.index(stop)
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    engine = make_engine(drafts=9)
    proposer = WrongThenRight(lambda request: answer + [1] * 9)
    proposer.turn = 9  # begin with a fully right draft
    engine.add_proposer(proposer, Budget(9, 9))
    (completion,) = engine.generate([prompts[5]], params)
    assert completion.token_ids == answer[: end + 1]
    assert completion.finish_reason == "stop"
    assert completion.stats.emitted == end  # all but the prefill's token
    assert completion.stats.accepted <= completion.stats.emitted


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_max_tokens_and_context_end_a_request(make_engine, prompts, tokens):
    engine = make_engine()
    (completion,) = engine.generate([prompts[5]], SamplingParams(max_tokens=tokens, ignore_eos=True))
    assert len(completion.token_ids) == tokens
    assert completion.finish_reason == "length"
    long = [3] * (engine.context - tokens)
    (completion,) = engine.generate([long], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(completion.token_ids) == tokens
    assert completion.finish_reason == "length"


def test_eos_is_emitted_and_ends_the_request(make_target_folder, prompts):
    # Where every logit is equal the lowest id wins, and that is this target's EOS.
    import torch.nn as nn

    target = load_target(str(make_target_folder(seed=2)))
    nn.init.zeros_(target.lm_head.weight)
    engine = Engine(target, proposer="ngram", config=EngineConfig())
    (completion,) = engine.generate([prompts[5]], SamplingParams(max_tokens=9))
    assert completion.token_ids == [0]
    assert completion.finish_reason == "stop"
    (completion,) = engine.generate([prompts[5]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert completion.token_ids == [0] * 9
