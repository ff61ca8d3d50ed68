"""Plain seeded sampling follows the requested distribution, along a text and over seeds, in any batch.

Speculation gives the same ids (see the other files of this folder), so this holds with speculation too.
"""

from __future__ import annotations

import random

import pytest
import torch

from infer.request import SamplingParams
from tests.distributions import Z, chi_square_excess, sampling_probs
from tests.lossless.plain import ids

RUNS = 1000
PROMPT = [5, 40, 41, 7, 60]
SETTINGS = {
    "cool": {"temperature": 0.6},
    "as it is": {"temperature": 1.0},
    "hot": {"temperature": 1.5},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.2},
    "all of them": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
}


@pytest.fixture(scope="module")
def engine(make_small_engine):
    return make_small_engine(max_batch=96, max_tokens_in_cache=96 * 96, max_rows=1024)


@pytest.fixture(scope="module")
def logits_after(engine):
    """The logits of transformers for several texts of one length, `[B, T, V]`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(engine.target.folder).eval()
    with torch.no_grad():
        return lambda texts: model(torch.tensor(texts)).logits.detach()


@pytest.fixture(scope="module")
def pairs(engine):
    """The two tokens sampled with each of RUNS seeds under each setting, all in one run, in random order."""
    cases = [(name, seed) for name in SETTINGS for seed in range(RUNS)]
    random.Random(0).shuffle(cases)
    params = [
        SamplingParams(max_tokens=2, ignore_eos=True, seed=seed * 7919 + (seed << 33), **SETTINGS[name])
        for name, seed in cases
    ]
    chosen = ids(engine.generate([PROMPT] * len(params), params))
    token_pairs: dict[str, list] = {name: [None] * RUNS for name in SETTINGS}
    for (name, seed), tokens in zip(cases, chosen, strict=True):
        token_pairs[name][seed] = tokens
    return token_pairs


def excess(pairs, logits_after, **setting) -> float:
    """Return the largest chi-square excess of the first token, the second token, and the pair."""
    V = 96
    index = torch.tensor(pairs)
    counts = torch.bincount(index[:, 0] * V + index[:, 1], minlength=V * V).view(V, V)
    first = sampling_probs(logits_after([PROMPT])[0, -1], **setting)
    rows = logits_after([[*PROMPT, token] for token in range(V)])[:, -1]
    probs = first[:, None] * torch.stack([sampling_probs(row, **setting) for row in rows])
    views = ((counts.sum(1), probs.sum(1)), (counts.sum(0), probs.sum(0)), (counts.flatten(), probs.flatten()))
    return max(chi_square_excess(*view) for view in views)


@pytest.mark.parametrize("name", SETTINGS)
def test_over_seeds(pairs, logits_after, name):
    assert excess(pairs[name], logits_after, **SETTINGS[name]) < Z


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("cool", {"temperature": 0.75}),
        ("cool", {"temperature": 0.5}),
        ("hot", {"temperature": 1.1}),
        ("as it is", {"top_p": 0.95}),
        ("top_k", {"top_k": 8}),
        ("top_k", {"top_k": 6}),
        ("top_p", {"top_p": 0.75}),
        ("min_p", {"temperature": 1.2, "min_p": 0.15}),
    ],
)
def test_the_bound_notices_a_law_that_is_a_little_wrong(pairs, logits_after, name, wrong):
    assert excess(pairs[name], logits_after, **wrong) > Z


@pytest.mark.parametrize("name", SETTINGS)
def test_along_a_text(engine, logits_after, name):
    """Tokens' (randomised) quantiles are uniform: a seed's noise is independent from position to position."""
    length, texts = 90, 12
    params = [SamplingParams(max_tokens=length, ignore_eos=True, seed=seed, **SETTINGS[name]) for seed in range(texts)]
    chosen = ids(engine.generate([PROMPT] * texts, params))
    logits = logits_after([PROMPT + tokens for tokens in chosen])
    generator = torch.Generator().manual_seed(1)
    quantiles = []
    for tokens, rows in zip(chosen, logits, strict=True):
        for token, row in zip(tokens, rows[len(PROMPT) - 1 :], strict=False):
            probs = sampling_probs(row, **SETTINGS[name])
            share = float(torch.rand((), generator=generator))
            quantiles.append(float(probs[:token].sum() + share * probs[token]))
    counts = torch.histc(torch.tensor(quantiles), bins=30, min=0, max=1)
    assert counts.sum() == texts * length
    assert chi_square_excess(counts, torch.full((30,), 1 / 30)) < Z


def test_alone_it_is_the_same(make_small_engine, pairs):
    alone = make_small_engine(max_batch=1)
    for name, setting in SETTINGS.items():
        for seed in range(6):
            params = SamplingParams(max_tokens=2, ignore_eos=True, seed=seed * 7919 + (seed << 33), **setting)
            assert ids(alone.generate([PROMPT], params)) == [pairs[name][seed]]
