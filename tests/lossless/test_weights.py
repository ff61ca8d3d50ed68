"""Weights in 8 or 4 bits, or KV in 8, make another target: its text may differ, but drafts do not change it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from infer.config import EngineConfig
from infer.console.card import quantized_row
from models.heads.block import BlockHead, base_logits
from tests.heads import ONE_OF_EACH
from tests.interpreted import scaled
from tests.lossless.plain import GREEDY, SAMPLED, ids
from tests.pairwise import parametrize_each


@pytest.mark.parametrize(("weights", "error"), [("int8", 0.02), ("fp8", 0.1), ("int4", 0.2)])
def test_drafts_change_no_token_of_a_target_with_narrow_weights(make_small_engine, weights, error):
    prompts = [[5, 6, 7] * 6, list(range(30, 60))]
    for params in (GREEDY, SAMPLED):
        plain = ids(make_small_engine(weights=weights).generate(prompts, params))
        engine = make_small_engine(proposer="head", weights=weights)
        completions = engine.generate(prompts, params)
        assert ids(completions) == plain
        assert all(completion.stats.drafted > 0 for completion in completions)
    logits, reference = (make_small_engine(weights=fmt).target.logits(torch.ones(1, 32)) for fmt in (weights, "same"))
    assert 0 < (logits - reference).abs().max() < error * reference.abs().max()


@parametrize_each({"head": ONE_OF_EACH, "weights": ["int8", "int4", "q8_0"]})
def test_a_head_in_fewer_bits_drafts_a_little_otherwise_and_changes_no_token(
    make_engine, prompts, expected, head, weights
):
    few = prompts[2:5]
    engines = [make_engine(head=head, head_weights=fmt, max_batch=4) for fmt in ("same", weights)]
    for params in (GREEDY, SAMPLED):
        plain = expected[torch.float32, params][2:5]
        assert [ids(engine.generate(few, params)) for engine in engines] == [plain, plain]
    rows = [quantized_row("head weights", engine.config.head_weights, engine) for engine in engines]
    assert rows == [[], [("head weights", weights)]]
    accepted = [engine.stats.speculation.accepted for engine in engines]
    assert accepted[1] > accepted[0] / 2 > 0
    modules = [engine.head for engine in engines]
    state = torch.randn(3, modules[0].config.hidden_size, generator=torch.Generator().manual_seed(0))
    full, narrow = (
        base_logits(module, state) if isinstance(module, BlockHead) else module.logits(state, 0) for module in modules
    )
    assert 0 < (full - narrow).abs().max() < {"int8": 0.05, "int4": 0.5, "q8_0": 0.05}[weights] * full.abs().max()


@pytest.mark.parametrize(
    ("key", "value", "choices"),
    [
        ("weights", "q8_0", "same, native, widened, int8, fp8, int4$"),
        ("head_weights", "int3", "same, auto, int8, fp8, int4, q8_0, q5_1, q5_0, q4_1, q4_0$"),
    ],
)
def test_an_unknown_format_is_an_error(key, value, choices):
    with pytest.raises(ValueError, match=f"engine.{key}={value}: must be one of {choices}"):
        EngineConfig(**{key: value})


def test_drafts_change_no_token_over_keys_and_values_of_8_bits(make_small_engine):
    """A batch with chains or trees, graphs and pre-emptions gives the tokens of one request at a time."""
    dtype, prompts = torch.bfloat16, [[5, 6, 7] * 6, list(range(30, 60)), [5, 6, 7] * 6 + [9]]
    plain = make_small_engine(dtype, kv_dtype="fp8", max_batch=1, prefix_cache=False)
    unquantized = make_small_engine(dtype, max_batch=1)
    assert {cache.dtype for cache in plain._pool.layers.caches} == {torch.float8_e4m3fn}
    assert plain.memory.kv * dtype.itemsize == unquantized.memory.kv
    engines = [
        make_small_engine(dtype, "head", {"tree": "beam:3x4:9"}, kv_dtype="fp8", graphs="on"),
        make_small_engine(dtype, "draft_model", kv_dtype="fp8", max_tokens_in_cache=96, prefill_chunk=16),
    ]
    for params in (replace(GREEDY, max_tokens=scaled(16, 5)), replace(SAMPLED, max_tokens=scaled(16, 5))):
        expected = [ids(plain.generate([prompt], params))[0] for prompt in prompts]
        for engine in engines:
            completions = engine.generate(prompts, params)
            assert ids(completions) == expected
            assert all(completion.stats.drafted > 0 for completion in completions)
    short_params = replace(GREEDY, max_tokens=2, logprobs=0)
    in_8, in_16 = (engine.generate(prompts, short_params) for engine in (plain, unquantized))
    differs = [narrow.logprobs != wide.logprobs for narrow, wide in zip(in_8, in_16, strict=True)]
    assert all(differs), "8 bits are too few to leave a probability what it was"
