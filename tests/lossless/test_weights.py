"""Weights of 8 bits are another target: its text may differ, and drafts change none of it."""

from __future__ import annotations

import pytest
import torch

from infer.config import EngineConfig
from tests.lossless.plain import GREEDY, SAMPLED, ids


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_drafts_change_no_token_of_a_target_with_weights_of_8_bits(make_small_engine, weights):
    prompts = [[5, 6, 7] * 6, list(range(30, 60))]
    for params in (GREEDY, SAMPLED):
        plain = ids(make_small_engine(weights=weights).generate(prompts, params))
        engine = make_small_engine(proposer="head", weights=weights)
        completions = engine.generate(prompts, params)
        assert ids(completions) == plain
        assert all(completion.stats.drafted > 0 for completion in completions)
    own, other = (make_small_engine(weights=format).target.logits(torch.ones(1, 32)) for format in (weights, "same"))
    assert 0 < (own - other).abs().max() < 0.1 * other.abs().max()


def test_an_unknown_format_is_an_error():
    with pytest.raises(ValueError, match="engine.weights=int4: must be one of same, int8, fp8"):
        EngineConfig(weights="int4")
