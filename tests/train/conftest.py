"""Fixtures shared by the tests of training: an engine with a packed copy of the tiny target, its outputs, and heads."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.config import EngineConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams
from models.heads.eagle3.config import Eagle3Options
from models.heads.eagle3.head import Eagle3Head
from models.heads.weights import initialize, set_vocabulary
from models.targets import load_target
from models.targets.llama import LlamaTarget
from models.vocab import build_draft_vocab
from tests.heads import memorise
from tests.train.running import SETTINGS, leave_out_plots
from tests.unit.reference import randomise_biases_and_norms
from train.data.sequences import Sequences

STEPS = 4


@pytest.fixture(scope="session")
def engine(tiny_target_folder: Path) -> Engine:
    """Return an engine with a packed target and up to STEPS draft tokens; leave it idle, with proposer "none"."""
    config = EngineConfig(max_tokens_in_cache=2048, max_batch=8)
    drafts = ProposerConfig(name="head", max_draft_tokens=STEPS)
    target = load_target(str(tiny_target_folder))
    return Engine(target, proposer="none", config=config, proposer_config=drafts)


@pytest.fixture(scope="session")
def responses(engine: Engine) -> Sequences:
    """Prompts of 6 to 11 tokens and the target's greedy continuations of them."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 384, (6 + index,), generator=generator).tolist() for index in range(6)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=False))
    return Sequences.of_completions(completions)


def write_family(kind: str, folder: Path, **options: Any) -> Path:
    """Write a random target of eight layers, whose config is of class `kind`; an option of None leaves its key out."""
    import transformers

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    stated = {name: value for name, value in (sizes | options).items() if value is not None}
    config = getattr(transformers, kind)(**stated)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    randomise_biases_and_norms(folder)
    return folder


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of full attention and four with a sliding window of 16 tokens, alternating."""
    sizes = {"head_dim": 32, "sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24}
    return write_family("Gemma3TextConfig", tmp_path_factory.mktemp("gemma"), **sizes)


@pytest.fixture
def plots() -> None:
    """Runs of a test that names this fixture write plots and plan, for which others are not looked at."""


@pytest.fixture(autouse=True)
def no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "plots" not in request.fixturenames:
        leave_out_plots(monkeypatch)


@pytest.fixture
def settings(tiny_target_folder: Path, tmp_path: Path) -> list[str]:
    return [*SETTINGS, f"model.path={tiny_target_folder}", f"output_dir={tmp_path}"]


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Limit every file to `limit` bytes, so that a write fails half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def make_head(target: LlamaTarget, responses: Sequences, *, vocab: int = 128, **flags: bool) -> Eagle3Head:
    """Return a random head for `target`, which must not be packed."""
    head = Eagle3Head(Eagle3Options(draft_vocab_size=vocab, **flags).for_target(target.config))
    set_vocabulary(head, *build_draft_vocab(responses.counts(target.config.vocab_size), vocab, forced_ids=[0]))
    initialize(head, target, from_target=False, seed=1)
    return head


@pytest.fixture
def random_head(tiny_target: LlamaTarget, responses: Sequences) -> Eagle3Head:
    return make_head(tiny_target, responses)


@pytest.fixture(scope="session")
def trained_head(engine: Engine, tiny_target: LlamaTarget, responses: Sequences) -> Eagle3Head:
    """Return a head trained to memorise `responses`, so that drafts of every length are accepted."""
    head = make_head(tiny_target, responses)
    memorise(head, engine.target, responses, STEPS)
    return head
