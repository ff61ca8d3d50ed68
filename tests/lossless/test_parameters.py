"""Every parameter of a request, alone and in pairs, in one batch with all the others, under every proposer.

The oracle is plain decoding, one request at a time. Token ids, finish reasons and log-probabilities must be equal, bit
for bit.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from infer.request import SamplingParams
from models.tokenizer import Tokenizer

TOKENS = 18
CHOICES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7},
}
PARAMETERS = {
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {7: 4.0, 9: -3.0}},
    "bad words": {"bad_words": (*((token,) for token in range(150, 384)), (9, 9), (5, 6))},
    "allowed": {"allowed_token_ids": tuple(range(3, 120))},
    "min tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(40, 90))},
    "stop ids": {"stop_token_ids": tuple(range(100, 112))},
    "stop strings": {"stop": ("e", "th", "\n")},
    "logprobs": {"logprobs": 3},
    "processed logprobs": {"logprobs": 2, "logprobs_of": "processed"},
    "prompt logprobs": {"prompt_logprobs": 1},
    "few tokens": {"max_tokens": 4},
    "short drafts": {"max_draft_tokens": 1},
    "no drafts": {"speculate": False},
    "own proposer": {"proposer": "ngram"},
}
ENGINES = {
    "ngram": {"proposer": "ngram"},
    "suffix": {"proposer": "suffix", "drafts": 6},
    "head chain": {"proposer": "head"},
    "head tree": {"proposer": "head", "shape": {"tree_width": 4, "tree_nodes": 14}},
    "draft model": {"proposer": "draft_model", "draft_model": "same"},
    "other draft model": {"proposer": "draft_model", "draft_model": "other"},
    "combined": {
        "proposer": "combined",
        "shape": {"sources": ["suffix", "head", "draft_model"]},
        "draft_model": "same",
    },
}


def combine(*names: str, choice: str) -> SamplingParams:
    merged: dict = {"max_tokens": TOKENS, "ignore_eos": True}
    for name in names:
        merged |= PARAMETERS[name]
    merged["min_tokens"] = min(merged.get("min_tokens", 0), merged["max_tokens"])
    return SamplingParams(**merged | CHOICES[choice])


@pytest.fixture(scope="module")
def cases(prompts) -> list[tuple[str, list[int], SamplingParams]]:
    """Every pair of parameters, greedy and seeded in turns, and each parameter alone both ways."""
    combinations = [(name,) for name in PARAMETERS for _ in CHOICES] + list(itertools.combinations(PARAMETERS, 2))
    picked = []
    for index, names in enumerate(combinations):
        choice = list(CHOICES)[index % 2]
        prompt = [prompts[i] for i in (2, 5, 9, 10)][index % 4]
        picked.append((f"{'+'.join(names)} {choice}", prompt, combine(*names, choice=choice)))
    return picked


@pytest.fixture(scope="module")
def tokenizer(tiny_target_folder) -> Tokenizer:
    return Tokenizer.load(tiny_target_folder)


def answer(completion):
    return (
        completion.token_ids,
        completion.finish_reason,
        completion.stop_reason,
        completion.text,
        completion.logprobs,
        completion.prompt_logprobs,
    )


@pytest.fixture(scope="module")
def expected(make_engine, cases, tokenizer):
    answers = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(dtype, "none", tokenizer=tokenizer, max_batch=1)
        answers[dtype] = [answer(engine.generate([prompt], params)[0]) for _, prompt, params in cases]
    return answers


def check(engine, cases, expected):
    completions = engine.generate([prompt for _, prompt, _ in cases], [params for _, _, params in cases])
    for (name, _, params), completion, wanted in zip(cases, completions, expected, strict=True):
        assert answer(completion) == wanted, f"{name}: {params}"
    engine._pool.invariants([])
    return completions


@pytest.mark.parametrize("name", ENGINES)
def test_in_one_batch_under_every_proposer(make_engine, cases, expected, tokenizer, name):
    engine = make_engine(tokenizer=tokenizer, max_batch=24, **ENGINES[name])
    completions = check(engine, cases, expected[torch.float32])
    drafted = sum(completion.stats.drafted for completion in completions)
    accepted = sum(completion.stats.accepted for completion in completions)
    assert 0 < accepted < drafted
    for (_, _, params), completion in zip(cases, completions, strict=True):
        if not params.speculate:
            assert completion.stats.drafted == 0
        if params.max_draft_tokens == 1:
            assert len(completion.stats.drafted_by_position) <= 1


@pytest.mark.parametrize("name", ["head tree", "combined"])
def test_in_bf16(make_engine, cases, expected, tokenizer, name):
    check(make_engine(torch.bfloat16, tokenizer=tokenizer, **ENGINES[name]), cases, expected[torch.bfloat16])


@pytest.mark.parametrize("name", ["suffix", "head tree", "combined"])
def test_under_pre_emption_and_small_chunks(make_engine, cases, expected, tokenizer, name):
    engine = make_engine(
        tokenizer=tokenizer,
        max_batch=16,
        max_tokens_in_cache=384,
        page_size=4,
        prefill_chunk=7,
        max_rows=90,
        **ENGINES[name],
    )
    check(engine, cases, expected[torch.float32])
    assert engine.stats.preemptions > 0


def test_the_cases_do_something(make_engine, cases, expected, tokenizer):
    """Otherwise equality would prove nothing: each parameter changes an answer, each way to stop occurs."""
    engine = make_engine(proposer="none", tokenizer=tokenizer)
    for name in ("top_k", "top_p", "min_p", "presence", "frequency", "repetition", "bias", "allowed", "bad words"):
        changed = []
        for (case, prompt, _), (token_ids, *_) in zip(cases, expected[torch.float32], strict=True):
            if case.rsplit(" ", 1)[0] == name:
                plain = combine(choice=case.rsplit(" ", 1)[1])
                changed.append(engine.generate([prompt], plain)[0].token_ids != token_ids)
        assert any(changed), name
    reasons = {(reason, type(stop)) for _, reason, stop, *_ in expected[torch.float32]}
    assert {("stop", int), ("stop", str), ("length", type(None))} <= reasons


def test_n_answers_have_seeds_in_a_row_and_equal_requests_of_their_own(make_engine, prompts):
    engine = make_engine(proposer="head")
    params = SamplingParams(temperature=1.0, seed=40, n=3, max_tokens=TOKENS, ignore_eos=True)
    completions = engine.generate([prompts[5], prompts[9]], params)
    assert [completion.seed for completion in completions] == [40, 41, 42] * 2
    single = SamplingParams(temperature=1.0, seed=41, max_tokens=TOKENS, ignore_eos=True)
    assert completions[1].token_ids == engine.generate([prompts[5]], single)[0].token_ids
    assert len({tuple(completion.token_ids) for completion in completions[:3]}) == 3


def test_logprobs_are_the_targets_own(make_engine, tiny_target_folder, prompts):
    """Against transformers, which knows nothing of us: raw log-probabilities of prompt and answer."""
    from transformers import AutoModelForCausalLM

    engine = make_engine(proposer="head", shape={"tree_width": 3})
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    (completion,) = engine.generate([prompts[5]], params)
    ids = prompts[5] + completion.token_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny_target_folder)(torch.tensor([ids])).logits[0]
    law = logits.double().log_softmax(-1)
    scored = [*completion.prompt_logprobs, *completion.logprobs]
    assert len(scored) == len(ids) - 1
    for place, entry in enumerate(scored):
        assert entry.token == ids[place + 1]
        assert abs(entry.logprob - law[place, entry.token].item()) < 1e-4
    for place, entry in enumerate(completion.logprobs, start=len(prompts[5]) - 1):
        assert [token for token, _ in entry.top] == law[place].topk(2).indices.tolist()
        assert entry.rank == 1
