"""NaN logits end the request that would emit a token of them, in words, and no other; a rejected draft's end nothing.

The embedding of some tokens is NaN, so all that follows one of them is.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from infer.config import EngineConfig
from infer.engine import Engine
from infer.request import SamplingParams
from infer.sampling.emission import NAN
from kernels.cpu.library import SWITCH, library
from models.targets import load_target
from tests.lossless.conftest import SMALL
from tests.lossless.random_requests import VOCAB_SIZE
from tests.lossless.test_isolation import nothing_is_held, run
from tests.pairwise import parametrize_each

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=5)
REQUESTS = {
    "greedy": ([5, 6, 7], GREEDY),
    "sampled": ([9] * 17, SAMPLED),
    "cut": ([4, 6] * 9, replace(SAMPLED, top_k=30, top_p=0.95, min_p=0.01)),
    "scored": ([8], replace(SAMPLED, presence_penalty=0.5, logprobs=2)),
}
WAYS = {
    "plain": {"proposer": "none"},
    "chain": {"proposer": "head"},
    "tree": {"proposer": "head", "shape": {"tree": "beam:3x4:9"}},
    "suffix": {"proposer": "suffix"},
    "draft model": {"proposer": "draft_model"},
    "overlapped chain": {"proposer": "head", "graphs": "on"},
    "overlapped tree": {"proposer": "head", "shape": {"tree": "beam:3x4:9"}, "graphs": "on"},
    "overlapped, plain": {"proposer": "none", "graphs": "on"},
}


@pytest.fixture(scope="module")
def plain(make_plain):
    return {name: make_plain(small=True)(*request).token_ids for name, request in REQUESTS.items()}


@pytest.fixture
def engine(way, make_small_engine):
    return make_small_engine(max_batch=8, **WAYS[way])


@parametrize_each({"way": list(WAYS), "doomed": list(REQUESTS)})
def test_the_request_ends_where_its_logits_are_nan(engine, plain, doomed):
    others = {token for name in REQUESTS if name != doomed for token in (*plain[name], *REQUESTS[name][0])}
    own = plain[doomed]
    place = next(index for index, token in enumerate(own) if index > 1 and token not in {*others, *own[:index]})
    engine.target.embed_tokens.weight.data[own[place]] = math.nan
    answers, ends = run(engine, REQUESTS)
    assert answers[doomed].token_ids == own[: place + 1]
    assert (ends[doomed].finish_reason, ends[doomed].error, ends[doomed].internal) == ("error", NAN, False)
    for name in REQUESTS.keys() - {doomed}:
        assert (answers[name].token_ids, ends[name].finish_reason) == (plain[name], "length")
    nothing_is_held(engine)


@pytest.mark.parametrize("way", WAYS)
def test_at_the_first_token_too(engine, plain):
    engine.target.embed_tokens.weight.data[3] = math.nan
    answers, ends = run(engine, {"doomed": ([7, 3], GREEDY), "greedy": REQUESTS["greedy"]})
    assert (answers["doomed"].token_ids, ends["doomed"].error) == ([], NAN)
    assert 3 in plain["greedy"] or answers["greedy"].token_ids == plain["greedy"]


@pytest.mark.parametrize("way", WAYS)
def test_drafts_that_are_rejected_end_nothing_and_leave_nothing(engine, plain):
    """Every token that no request has is such a draft. Its keys and values stay behind in pages that are read."""
    used = {token for name, (prompt, _) in REQUESTS.items() for token in (*plain[name], *prompt)}
    unused = [token for token in range(VOCAB_SIZE) if token not in used]
    engine.target.embed_tokens.weight.data[unused] = math.nan
    for _ in range(2):  # the second time in pages that were used before
        answers, ends = run(engine, {"first": (unused[:20], GREEDY), **REQUESTS})
        assert ends.pop("first").error == NAN
        assert {name: answers[name].token_ids for name in REQUESTS} == plain
        assert {end.finish_reason for end in ends.values()} == {"length"}


@pytest.mark.parametrize("kernels", ["c", "torch"])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_damaged_attention_is_not_served(make_target_folder, monkeypatch, kernels, part):
    """Scores that are NaN leave no weight of zero behind, with which a row would look like any other."""
    monkeypatch.setenv(SWITCH, kernels)
    library.cache_clear()
    folder = make_target_folder(num_hidden_layers=2, **SMALL)
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.0.self_attn.{part}_proj.weight"][3, 5] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    engine = Engine(load_target(str(folder)), proposer="none", config=EngineConfig(exact=False))
    answers, ends = run(engine, {"first": ([7, 3], GREEDY)})
    library.cache_clear()
    assert (answers["first"].token_ids, ends["first"].error) == ([], NAN)
