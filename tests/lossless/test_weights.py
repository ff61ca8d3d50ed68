"""Weights of 8 or 4 bits, or keys and values of 8, are another target: its text may differ, and drafts change none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from infer.config import EngineConfig
from tests.interpreted import scaled
from tests.lossless.plain import GREEDY, SAMPLED, ids


@pytest.mark.parametrize(("weights", "error"), [("int8", 0.02), ("fp8", 0.1), ("int4", 0.2)])
def test_drafts_change_no_token_of_a_target_with_narrow_weights(make_small_engine, weights, error):
    prompts = [[5, 6, 7] * 6, list(range(30, 60))]
    for params in (GREEDY, SAMPLED):
        plain = ids(make_small_engine(weights=weights).generate(prompts, params))
        engine = make_small_engine(proposer="head", weights=weights)
        completions = engine.generate(prompts, params)
        assert ids(completions) == plain
        assert all(completion.stats.drafted > 0 for completion in completions)
    own, other = (make_small_engine(weights=format).target.logits(torch.ones(1, 32)) for format in (weights, "same"))
    assert 0 < (own - other).abs().max() < error * other.abs().max()


def test_an_unknown_format_is_an_error():
    with pytest.raises(ValueError, match="engine.weights=int3: must be one of same, int8, fp8, int4"):
        EngineConfig(weights="int3")


def test_drafts_change_no_token_over_keys_and_values_of_8_bits(make_small_engine):
    """One request alone and all together, in chains and trees, through graphs and after pre-emptions."""
    dtype, prompts = torch.bfloat16, [[5, 6, 7] * 6, list(range(30, 60)), [5, 6, 7] * 6 + [9]]
    plain = make_small_engine(dtype, kv_dtype="fp8", max_batch=1, prefix_cache=False)
    whole = make_small_engine(dtype, max_batch=1)
    assert {cache.dtype for cache in plain._pool.layers.caches} == {torch.float8_e4m3fn}
    assert plain.memory.kv * dtype.itemsize == whole.memory.kv
    engines = [
        make_small_engine(dtype, "head", {"tree_width": 3, "tree_nodes": 9}, kv_dtype="fp8", graphs="on"),
        make_small_engine(dtype, "draft_model", kv_dtype="fp8", max_tokens_in_cache=96, prefill_chunk=16),
    ]
    for params in (replace(GREEDY, max_tokens=scaled(16, 5)), replace(SAMPLED, max_tokens=scaled(16, 5))):
        expected = [ids(plain.generate([prompt], params))[0] for prompt in prompts]
        for engine in engines:
            completions = engine.generate(prompts, params)
            assert ids(completions) == expected
            assert all(completion.stats.drafted > 0 for completion in completions)
    asked = replace(GREEDY, max_tokens=2, logprobs=0)
    in_8, in_16 = (engine.generate(prompts, asked) for engine in (plain, whole))
    seen = [own.logprobs != other.logprobs for own, other in zip(in_8, in_16, strict=True)]
    assert all(seen), "8 bits are too few to leave a probability what it was"
