from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from models.heads.draft_model.head import DraftModelHead
from models.heads.files import load_head, save_head
from models.targets import load_target
from tests.heads import make_head, memorise
from tests.interpreted import scaled
from tests.lossless.plain import LONG_GREEDY, MakePlain, Plain, ids
from tests.lossless.random_requests import VOCAB_SIZE
from train.data.sequences import Sequences


@pytest.fixture(scope="session")
def trained_head_folder(tiny_target, tiny_target_folder, once, prompts):
    """`trained_head_folder(name)`: the folder of an exported head that has memorised some greedy outputs."""

    def train(name, folder):
        engine = Engine(load_target(str(tiny_target_folder)), proposer="none")
        completions = engine.generate([prompt for prompt in prompts if len(prompt) < 100], LONG_GREEDY)
        rows = [
            (a.prompt_ids + a.token_ids, [False] * len(a.prompt_ids) + [True] * len(a.token_ids)) for a in completions
        ]
        head = make_head(tiny_target, name, seed=3)
        memorise(head, engine.target, Sequences.of(rows), 5, rounds=45)
        metadata = {
            "verifier": tiny_target.path,
            "verifier_architecture": "LlamaForCausalLM",
            "speculative_tokens": 4,
        }
        save_head(head, folder, provenance={"target_fingerprint": tiny_target.fingerprint}, **metadata)

    return lambda name: once(f"head {name}", partial(train, name))


@pytest.fixture(scope="session")
def make_engine(tiny_target_folder, tiny_head_folder, trained_head_folder, make_target_folder):
    """`make_engine(dtype, proposer, **engine config)`; the tiny target stops at no token, so lengths are its own.

    `draft_model`: "same" drafts with the target itself, whose greedy drafts are always accepted, "other" with another
    model. `head`: one of ONE_OF_EACH; by default a random EAGLE-3 head initialized from the target's weights.
    """

    def make(
        dtype=torch.float32,
        proposer="head",
        drafts=4,
        shape=None,
        draft_model=None,
        tokenizer=None,
        head=None,
        timer=time.perf_counter,
        profile=True,
        **config,
    ):
        target = load_target(str(tiny_target_folder), dtype=dtype)
        drafter = None
        if draft_model is not None:
            folder = tiny_target_folder if draft_model == "same" else make_target_folder(seed=11, num_hidden_layers=1)
            drafter = DraftModelHead.of(load_target(str(folder), dtype=dtype), target.config.vocab_size)
        folder = tiny_head_folder if head is None else trained_head_folder(head)
        head = load_head(folder, dtype=dtype, target=target)
        proposer_config = ProposerConfig(name="auto", max_draft_tokens=drafts, **(shape or {}))
        return Engine(
            target,
            tokenizer=tokenizer,
            head=head,
            draft_model=drafter,
            proposer=proposer,
            config=EngineConfig(**config),
            proposer_config=proposer_config,
            timer=timer,
            profile=profile,
        )

    return make


@pytest.fixture(scope="session")
def prompts():
    """Prompts of lengths around the page (16), the tile (256) and the chunk; some repeat themselves, for n-grams."""
    generator = torch.Generator().manual_seed(0)
    lengths = scaled((1, 2, 15, 16, 17, 70, 255, 256, 300), (1, 2, 3, 5, 6, 7, 15, 16, 17))
    random_prompts = [torch.randint(1, 384, (n,), generator=generator).tolist() for n in lengths]
    return [*random_prompts, [5, 6, 7] * scaled(12, 4), [9] * scaled(40, 10)]


@pytest.fixture(scope="session")
def expected(make_engine, prompts):
    """Token ids of plain decoding, one request at a time, by dtype and parameters, in the order of the prompts."""

    class Expected(dict):
        def __missing__(self, key):
            dtype, params = key
            engine = make_engine(dtype, "none")
            self[key] = [ids(engine.generate([prompt], params))[0] for prompt in prompts]
            return self[key]

    return Expected()


SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
}


@pytest.fixture(scope="session")
def make_small_engine(make_target_folder, tiny_tokenizer):
    """`make_small_engine(dtype, proposer, shape, **engine config)`: a target of three layers with every proposer.

    For tests with thousands of requests. `head`: which of VARIANTS, with random weights; `draft_model` as in
    `make_engine`.
    """
    folder = make_target_folder(seed=4, num_hidden_layers=3, **SMALL)
    other_folder = make_target_folder(seed=11, num_hidden_layers=1, **SMALL)

    def make(
        dtype=torch.float32,
        proposer="none",
        shape=None,
        head="eagle3, whole vocabulary",
        draft_model="same",
        clock=time.monotonic,
        **config,
    ) -> Engine:
        target = load_target(str(folder), dtype=dtype)
        sources = ["suffix", "head", "draft_model"]
        options = {"max_draft_tokens": 4, "acceptance": [0.7, 0.4]}
        drafter = folder if draft_model == "same" else other_folder
        return Engine(
            target,
            tokenizer=tiny_tokenizer,
            head=make_head(load_target(str(folder)), head),
            draft_model=DraftModelHead.of(load_target(str(drafter), dtype=dtype), VOCAB_SIZE),
            proposer=proposer,
            config=EngineConfig(**config),
            proposer_config=ProposerConfig(name="auto", sources=sources, **options | (shape or {})),
            clock=clock,
        )

    return make


@pytest.fixture(scope="session")
def make_plain(make_engine, make_small_engine) -> MakePlain:
    """`make_plain(dtype, small=False)`: the oracle for the target of `make_engine` or `make_small_engine`."""
    oracles: dict[tuple[torch.dtype, bool], Plain] = {}

    def make(dtype=torch.float32, *, small=False) -> Plain:
        if (dtype, small) not in oracles:
            factory = make_small_engine if small else make_engine
            oracles[dtype, small] = Plain(factory(dtype, proposer="none", max_batch=1, prefix_cache=False))
        return oracles[dtype, small]

    return make
