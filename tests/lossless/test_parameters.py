"""Every parameter of a request, alone and in pairs, with every proposer and under every scheduling condition.

The oracle is plain decoding, one request at a time. Token ids, finish reasons and log-probabilities must be equal, bit
for bit.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from infer.engine import Engine
from infer.request import SamplingParams
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.confidence import Confidence
from infer.speculation.control.cost_model import CostModel, CostTable, Curve
from infer.speculation.control.planner import Controller
from tests.lossless.plain import Answer, answer_all
from tests.pairwise import pairwise
from tests.pools import check_pool

TOKENS = 18
CHOICES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7},
}
PARAMETERS = {
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.25},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {7: 4.0, 9: -3.0}},
    "bad words": {"bad_words": (*((token,) for token in range(60, 96)), (9, 9), (5, 6))},
    "allowed": {"allowed_token_ids": tuple(range(3, 60))},
    "min tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(20, 50))},
    "stop ids": {"stop_token_ids": tuple(range(70, 74))},
    "stop strings": {"stop": ("e", "AB", "z")},
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
    "suffix": {"proposer": "suffix", "shape": {"max_draft_tokens": 6}},
    "head chain": {"proposer": "head"},
    "head tree": {"proposer": "head", "shape": {"tree": "beam:4x4:14"}},
    "draft model": {"proposer": "draft_model"},
    "other draft model": {"proposer": "draft_model", "draft_model": "other", "shape": {"tree": "beam:4x4:14"}},
    "combined": {"proposer": "combined"},
}


def combine(*names: str, choice: str) -> SamplingParams:
    merged: dict = {"max_tokens": TOKENS, "ignore_eos": True}
    for name in names:
        merged |= PARAMETERS[name]
    merged["min_tokens"] = min(merged.get("min_tokens", 0), merged["max_tokens"])
    return SamplingParams(**merged | CHOICES[choice])


@pytest.fixture(scope="module")
def cases(prompts) -> list[tuple[str, list[int], SamplingParams]]:
    """Every pair of parameters, alternately greedy and seeded, and each parameter alone in both ways."""
    combinations = [(name,) for name in PARAMETERS for _ in CHOICES] + list(itertools.combinations(PARAMETERS, 2))
    picked = []
    for index, names in enumerate(combinations):
        choice = list(CHOICES)[index % 2]
        prompt = prompts[(2, 5, 9, 10)[index % 4]]
        picked.append((f"{'+'.join(names)} {choice}", [token % 96 for token in prompt], combine(*names, choice=choice)))
    return picked


@pytest.fixture(scope="module")
def expected(make_small_engine, cases):
    completions = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_small_engine(dtype, "none", max_batch=1, prefix_cache=False)
        completions[dtype] = [engine.generate([prompt], params)[0] for _, prompt, params in cases]
    return completions


def controlled(engine: Engine) -> Engine:
    """Plan as with `proposer.adaptive`, with costs at which drafting pays only for good drafts and few requests.

    Steps are recorded as taking what the table says, whatever this machine takes.
    """
    curves = Curve((1.0, 2.0), (0.004, 0.0045)), Curve((24.0, 48.0), (0.006, 0.012))
    drafts = Curve((1.0, 4.0), (0.0002, 0.0008)), Curve((1.0, 4.0), (0.0004, 0.0016))
    acceptance = AcceptanceModel()
    engine.speculator.planner = planner = Controller(
        CostModel(CostTable((1, 24), curves, dict.fromkeys(engine.speculator.names, drafts))),
        acceptance,
        Confidence(acceptance),
        probe_share=0.3,
    )
    record_step, table = planner.record_step, planner.costs.table
    planner.record_step = lambda batch, rows, drafting, seconds: record_step(batch, rows, 0.0, table.step(batch, rows))
    if engine._head is not None and engine._head.shape is None:
        engine._head.confidence = engine.speculator.planner.confidence
    return engine


@pytest.mark.parametrize(
    ("name", "adaptive"),
    [
        *((name, False) for name in ENGINES),
        *((name, True) for name in ("suffix", "head chain", "head tree", "combined")),
    ],
)
def test_in_one_batch_under_every_proposer(make_small_engine, cases, expected, name, adaptive):
    engine = make_small_engine(max_batch=24, **ENGINES[name])
    engine = controlled(engine) if adaptive else engine
    completions = engine.generate([prompt for _, prompt, _ in cases], [params for _, _, params in cases])
    for case, completion, wanted in zip(cases, completions, expected[torch.float32], strict=True):
        assert Answer.of(completion) == Answer.of(wanted), case
        assert completion.text == wanted.text, case
    drafted = sum(completion.stats.drafted for completion in completions)
    accepted = sum(completion.stats.accepted for completion in completions)
    assert 0 < accepted < drafted + adaptive  # planned drafts may all be right
    if adaptive:  # some request got no drafts, though it allows them
        speculating = [c for (*_, params), c in zip(cases, completions, strict=True) if params.speculate]
        assert any(c.stats.drafted == 0 for c in speculating if c.stats.steps > 3)
    check_pool(engine._pool, [])
    for (_, _, params), completion in zip(cases, completions, strict=True):
        if not params.speculate:
            assert completion.stats.drafted == 0
        if params.max_draft_tokens == 1:
            assert len(completion.stats.drafted_by_position) <= 1


MIXED = ("ngram", "suffix", "head", "draft_model", "combined", "none")
MORE_ENGINES = {
    **ENGINES,
    "fixed tree": {"proposer": "head", "shape": {"tree": [[0], [1], [2], [0, 0], [1, 0], [0, 1], [0, 0, 0]]}},
    "mixed": ENGINES["combined"],  # and each request selects one of MIXED
}
SEED = 0
FACTORS = {
    "dtype": (torch.float32, torch.bfloat16),
    "drafts": tuple(MORE_ENGINES),
    "prefix": ("not shared", "cold", "warm"),
    "prefill_chunk": (256, 7),
    "pages": ("ample", "tight"),
    "max_batch": (1, 3, 16),
    "arrival": ("at once", "scattered"),
    "adaptive": (False, True),
}
COMBINATIONS = pairwise(FACTORS, SEED)
CASES_EACH = 14


@pytest.mark.parametrize("turn", range(len(COMBINATIONS)))
def test_whatever_happens_to_it(make_small_engine, cases, expected, turn):
    """Combinations that cover every two values of two factors, each with some of the cases; every case is used."""
    factors = COMBINATIONS[turn]
    rng = random.Random(turn)
    order = random.Random(SEED).sample(range(len(cases)), len(cases))
    case_indices = [order[(turn * CASES_EACH + index) % len(order)] for index in range(CASES_EACH)]
    rng.shuffle(case_indices)
    requests = [cases[index][1:] for index in case_indices]
    if factors["drafts"] == "mixed":
        requests = [(prompt, replace(params, proposer=rng.choice(MIXED))) for prompt, params in requests]
    engine = make_small_engine(
        factors["dtype"],
        max_batch=factors["max_batch"],
        page_size=4,
        max_tokens_in_cache=112 if factors["pages"] == "tight" else 4096,
        prefill_chunk=factors["prefill_chunk"],
        max_rows=300,
        prefix_cache=factors["prefix"] != "not shared",
        **MORE_ENGINES[factors["drafts"]],
    )
    engine = controlled(engine) if factors["adaptive"] else engine
    if factors["prefix"] == "warm":
        engine.generate([prompt for prompt, _ in requests], SamplingParams(max_tokens=2, ignore_eos=True))
    scattered = factors["arrival"] == "scattered"
    arrivals = sorted(rng.randrange(40) for _ in requests) if scattered else ()
    answers = answer_all(engine, requests, arrivals)
    for index, answer in zip(case_indices, answers, strict=True):
        assert answer == Answer.of(expected[factors["dtype"]][index]), f"turn {turn}: {factors}: {cases[index]}"
    if factors["pages"] == "tight" and factors["max_batch"] == 16 and not scattered:
        assert engine.stats.preemptions > 0
    check_pool(engine._pool, [])


def test_the_combinations_cover_what_they_should():
    covered = {pair for combination in COMBINATIONS for pair in itertools.combinations(combination.items(), 2)}
    for first, second in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(FACTORS[first], FACTORS[second]):
            assert ((first, pair[0]), (second, pair[1])) in covered
    assert len(COMBINATIONS) * CASES_EACH > len(PARAMETERS) * (len(PARAMETERS) + 3) / 2  # every case is used


def test_the_cases_do_something(make_small_engine, cases, expected):
    """Check that equality is no empty claim: each parameter changes some output, and each way to stop occurs."""
    engine = make_small_engine(proposer="none")
    for name in ("top_k", "top_p", "min_p", "presence", "frequency", "repetition", "bias", "allowed", "bad words"):
        changed = []
        for (case, prompt, _), wanted in zip(cases, expected[torch.float32], strict=True):
            if case.rsplit(" ", 1)[0] == name:
                plain = combine(choice=case.rsplit(" ", 1)[1])
                changed.append(engine.generate([prompt], plain)[0].token_ids != wanted.token_ids)
        assert any(changed), name
    reasons = {(wanted.finish_reason, type(wanted.stop_reason)) for wanted in expected[torch.float32]}
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
    """Raw log-probabilities of prompt and output are those of transformers, an independent implementation."""
    from transformers import AutoModelForCausalLM

    engine = make_engine(proposer="head", shape={"tree": "beam:3x4"})
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    (completion,) = engine.generate([prompts[5]], params)
    ids = prompts[5] + completion.token_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny_target_folder)(torch.tensor([ids])).logits[0]
    log_probs = logits.double().log_softmax(-1)
    scored = [*completion.prompt_logprobs, *completion.logprobs]
    assert len(scored) == len(ids) - 1
    for position, entry in enumerate(scored):
        assert entry.token == ids[position + 1]
        assert abs(entry.logprob - log_probs[position, entry.token].item()) < 1e-4
    for position, entry in enumerate(completion.logprobs, start=len(prompts[5]) - 1):
        assert [token for token, _ in entry.top] == log_probs[position].topk(2).indices.tolist()
        assert entry.rank == 1
