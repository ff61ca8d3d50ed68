"""Weights that stay in a GGUF file's blocks: drafts change no token, chains or trees, alone or in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from kernels.cpu.library import library
from models.targets import load_target
from tests.gguf_writing import write_gguf
from tests.heads import make_head
from tests.lossless.plain import GREEDY, SAMPLED, ids

KINDS = {"Q4_1": (Kind.Q4_1,), "Q8_0": (Kind.Q8_0,), "Q4_K_M": (Kind.Q4_K, Kind.Q6_K, Kind.Q5_0)}
DRAFTS = {
    "n-gram": ("ngram", {}),
    "a head's chains": ("head", {}),
    "a head's trees": ("head", {"tree": "beam:3x4:9"}),
    "a smaller model": ("draft_model", {}),
}
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")


@pytest.fixture(scope="module")
def files(make_target_folder, tmp_path_factory):
    """Return `files(name)`: a file of a target of three layers with a tied LM head, in the formats of KINDS."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 128}
    folder = make_target_folder(seed=4, tie_word_embeddings=True, **sizes)
    written = {}

    def file(name):
        if name not in written:
            written[name] = tmp_path_factory.mktemp("file") / "tiny.gguf"
            write_gguf(folder, written[name], KINDS[name])
        return str(written[name])

    return file


def make_engine(file, dtype, proposer="none", shape=None, **config):
    return Engine(
        load_target(file, dtype=dtype, native=True),
        head=make_head(load_target(file), "eagle3, whole vocabulary") if proposer == "head" else None,
        draft_model=load_target(file, dtype=dtype) if proposer == "draft_model" else None,
        proposer=proposer,
        config=EngineConfig(max_tokens_in_cache=1024, **config),
        proposer_config=ProposerConfig(name="auto", max_draft_tokens=4, **(shape or {})),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_drafts_change_no_token(files, name, dtype):
    prompts = [[5, 6, 7] * 12, list(range(30, 60)), [9] * 40, [3]]
    plain = make_engine(files(name), dtype, max_batch=1, prefill_chunk=7, prefix_cache=False)
    assert plain.target.block_formats == tuple(sorted({kind.name for kind in KINDS[name]}))
    expected = [[ids(plain.generate([prompt], params))[0] for prompt in prompts] for params in (GREEDY, SAMPLED)]
    for proposer, shape in DRAFTS.values():
        engine = make_engine(files(name), dtype, proposer, shape, max_batch=4)
        for params, wanted in zip((GREEDY, SAMPLED), expected, strict=True):
            completions = engine.generate(prompts, params)
            assert ids(completions) == wanted
            assert sum(completion.stats.drafted for completion in completions) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_drafts_change_no_token_over_activations_of_8_bits(files, name, dtype):
    """One request at a time in chunks of seven gives the tokens of eight requests with chains or trees."""
    prompts, options = [[5, 6, 7] * 12, list(range(30, 60)), [9] * 40, [3]] * 2, {"activations": "int8"}
    plain = make_engine(files(name), dtype, max_batch=1, prefill_chunk=7, prefix_cache=False, **options)
    expected = [[ids(plain.generate([prompt], params))[0] for prompt in prompts] for params in (GREEDY, SAMPLED)]
    for proposer, shape in (("none", {}), *DRAFTS.values()):
        engine = make_engine(files(name), dtype, proposer, shape, max_batch=8, **options)
        for params, wanted in zip((GREEDY, SAMPLED), expected, strict=True):
            completions = engine.generate(prompts, params)
            assert ids(completions) == wanted
            assert (sum(completion.stats.drafted for completion in completions) > 0) == (proposer != "none")
    params, exact = replace(GREEDY, max_tokens=2, logprobs=0), make_engine(files(name), dtype)
    pairs = zip(plain.generate(prompts, params), exact.generate(prompts, params), strict=True)
    assert any(rounded.logprobs != same.logprobs for rounded, same in pairs)
