"""Weights that stay as published, in GGUF blocks or GPTQ groups: drafts change no token.

Chains, trees and plain decoding, alone and in a batch, with prompts in chunks, cached prefixes and pre-emptions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from kernels.cpu.library import library
from models.heads.draft_model.head import DraftModelHead
from models.targets import load_target
from tests.gguf_writing import write_gguf
from tests.heads import make_head
from tests.lossless.plain import GREEDY, ids
from tests.pairwise import parametrize_each
from tests.unit.quantized_writers import gptq, gptq_config, write

KINDS = {"Q4_1": (Kind.Q4_1,), "Q4_K_M": (Kind.Q4_K, Kind.Q6_K, Kind.Q5_0)}
FORMATS = (*KINDS, "GPTQ")
DRAFTS = {
    "plain": ("none", {}),
    "n-gram": ("ngram", {}),
    "a head's chains": ("head", {}),
    "a head's trees": ("head", {"tree": "beam:3x4:9"}),
    "a draft model's chains": ("draft_model", {}),
    "a draft model's trees": ("draft_model", {"tree": "beam:3x4:9"}),
}
SHARED = list(range(20, 52))  # two pages
PROMPTS = [[5, 6, 7] * 12, [*SHARED, 3], [*SHARED, 4, 9], [9] * 40, [3], [*SHARED, 5, 6], list(range(60, 90)), SHARED]
SEEDED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, top_k=60, seed=11)
PARAMETERS = (replace(GREEDY, max_tokens=16), SEEDED)
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")


@pytest.fixture(scope="module")
def checkpoints(make_target_folder, tmp_path_factory):
    """Return `checkpoints(name)`: a target of three layers with a tied LM head, in a format of FORMATS."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 128}
    small = {**sizes, "hidden_size": 64, "intermediate_size": 128}
    written = {}

    def checkpoint(name):
        if name not in written:
            place = tmp_path_factory.mktemp("checkpoint")
            folder = make_target_folder(seed=4, tie_word_embeddings=True, **(small if name == "GPTQ" else sizes))
            if name == "GPTQ":  # columns in an order of activations, with zero points
                quantize = gptq(4, 32, symmetric=False, shuffled=True)
                write(folder, gptq_config(32, desc_act=True, sym=False), quantize, place / "tiny", place / "dense")
                written[name] = place / "tiny"
            else:
                written[name] = place / "tiny.gguf"
                write_gguf(folder, written[name], KINDS[name])
        return str(written[name])

    return checkpoint


def make_engine(checkpoint, dtype, proposer="none", shape=None, **config):
    drafter = None
    if proposer == "draft_model":
        loaded = load_target(checkpoint, dtype=dtype, native=True)
        drafter = DraftModelHead.of(loaded, loaded.config.vocab_size)
    return Engine(
        load_target(checkpoint, dtype=dtype, native=True),
        head=make_head(load_target(checkpoint), "eagle3, whole vocabulary") if proposer == "head" else None,
        draft_model=drafter,
        proposer=proposer,
        config=EngineConfig(**config),
        proposer_config=ProposerConfig(name="auto", max_draft_tokens=4, **(shape or {})),
    )


@parametrize_each({"name": list(FORMATS), "activations": ["same", "auto"], "dtype": [torch.float32, torch.bfloat16]})
def test_drafts_change_no_token(checkpoints, name, activations, dtype):
    checkpoint = checkpoints(name)
    oracle = make_engine(checkpoint, dtype, max_batch=1, prefix_cache=False, activations=activations)
    assert len(oracle.target.ggml_formats) == len(KINDS.get(name, "G"))
    expected = [[ids(oracle.generate([prompt], params))[0] for prompt in PROMPTS] for params in PARAMETERS]
    assert oracle.stats.cached_tokens == oracle.stats.preemptions == 0
    for proposer, shape in DRAFTS.values():
        limits = {"max_batch": 8, "prefill_chunk": 7, "max_tokens_in_cache": 256, "activations": activations}
        engine = make_engine(checkpoint, dtype, proposer, shape, **limits)
        for params, wanted in zip(PARAMETERS, expected, strict=True):
            together = engine.generate(PROMPTS, params)
            assert ids(together) == wanted
            assert ids(engine.generate(PROMPTS[:1], params)) == wanted[:1]
            drafted = sum(completion.stats.drafted for completion in together)
            assert drafted == 0 if proposer == "none" else drafted > 0 or (proposer == "ngram" and params is SEEDED)
        assert engine.stats.cached_tokens > 0
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("name", FORMATS)
def test_activations_of_8_bits_round_otherwise(checkpoints, name):
    params, outputs = replace(GREEDY, max_tokens=2, logprobs=0), []
    for activations in ("same", "int8", "auto"):
        engine = make_engine(checkpoints(name), torch.float32, activations=activations)
        outputs.append([completion.logprobs for completion in engine.generate(PROMPTS[:3], params)])
    assert outputs[0] != outputs[1] == outputs[2]
