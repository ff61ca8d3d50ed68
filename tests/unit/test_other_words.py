"""Options under the names that vLLM's documents print: accepted where they are ours, else told what they are here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.config import EngineConfig, GenerateConfig, ModelConfig, ProposerConfig, ServeConfig, ServerConfig
from infer.engine import Engine
from infer.kvcache.memory import MIB
from infer.options.cli import compose
from infer.request import SamplingParams
from infer.settings.other_names import elsewhere
from models.heads.config import HeadConfig
from train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [11, 12, 13]
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)


def load(folder: Path, config: EngineConfig | None = None, head: Path | None = None, **proposer: Any) -> Engine:
    heads = None if head is None else HeadConfig(name="eagle3", path=str(head))
    settings = ProposerConfig(**{"name": "ngram" if head is None else "head", **proposer})
    return Engine.load(ModelConfig(name="x", path=str(folder), device="cpu"), heads, config, settings)


def test_keys_without_their_group() -> None:
    words = ["seed=3", "max_model_len=256", "memory_share=0.5", "acceptance=typical", "posterior_threshold=0.2"]
    config = compose("serve", ServeConfig, [*words, "posterior_alpha=0.4"])
    assert (config.engine.seed, config.engine.max_model_len, config.engine.memory_share) == (3, 256, 0.5)
    drafts = config.proposer
    assert (drafts.acceptance, drafts.posterior_threshold, drafts.posterior_alpha) == ("typical", 0.2, 0.4)
    assert compose("serve", ServeConfig, ["acceptance=rejection"]).proposer.acceptance == "exact"
    sizes = compose("generate", GenerateConfig, ["proposer=ngram", "prompt_lookup_max=5", "prompt_lookup_min=3"])
    assert sizes.proposer.lookup_sizes == (3, 5)
    copies = ["suffix_decoding_max_tree_depth=24", "suffix_decoding_max_spec_factor=1.0"]
    copies += ["suffix_decoding_min_token_prob=0.2", "suffix_decoding_max_cached_requests=0", "parallel_drafting=false"]
    suffix = compose("serve", ServeConfig, ["proposer=suffix", *copies]).proposer
    assert (suffix.suffix_decoding_max_tree_depth, suffix.suffix_decoding_max_spec_factor) == (24, 1.0)
    assert (suffix.suffix_decoding_min_token_prob, suffix.suffix_decoding_max_cached_requests) == (0.2, 0)
    assert suffix.parallel_drafting is False
    generate = compose("generate", GenerateConfig, ["seed=3"])
    assert (generate.seed, generate.engine.seed) == (3, None)  # a command's own key
    assert compose("train", TrainConfig, ["seed=3"]).seed == 3


@pytest.mark.parametrize(
    ("schema", "key", "hint"),
    [
        (EngineConfig, "gpu_memory_utilization", "here engine.memory_share"),
        (EngineConfig, "tensor_parallel_size", "here engine.tensor_parallel"),
        (ProposerConfig, "num_speculative_tokens", "here proposer.max_draft_tokens"),
        (ServerConfig, "api_key", "here HEADWAY_API_KEY or server.api_keys_file"),
        (ModelConfig, "nonsense", "known: name, path, revision, dtype, device"),
    ],
)
def test_keywords_in_python(schema: Any, key: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"{schema.__name__}: {key}: unknown key; {hint}"):
        schema(**{key: 1})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("num_speculative_tokens=5", "num_speculative_tokens: unknown key; here proposer.max_draft_tokens"),
        ("proposer.num_speculative_tokens=5", "proposer.num_speculative_tokens: unknown key; here proposer.max_draft"),
        ("+engine.gpu_memory_utilization=0.9", "engine.gpu_memory_utilization: unknown key; here engine.memory_share"),
        ("tensor_parallel_size=2", "tensor_parallel_size: unknown key; here engine.tensor_parallel"),
        ("max_num_seqs=8", "max_num_seqs: unknown key; here engine.max_batch"),
        ("disable_by_batch_size=8", "disable_by_batch_size: unknown key; here proposer.adaptive=true"),
        (
            'speculative_config={"method": "ngram"}',
            "speculative_config: unknown key; here proposer=<name> and head=<name>",
        ),
        ("draft_tensor_parallel_size=1", "draft_tensor_parallel_size: unknown key; here engine.tensor_parallel, which"),
        ("engine.max_model_length=8", "engine.max_model_length: unknown key; did you mean max_model_len?"),
        ("acceptance=mostly", "proposer.acceptance=mostly: must be one of exact, block, typical"),
        ("acceptance=[0.5,2]", r"proposer.acceptance=\[0.5, 2\]: must be rates"),
        ("memory_share=0", "engine.memory_share=0.0: must be above 0"),
    ],
)
def test_what_has_another_name_here(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose("serve", ServeConfig, [word])


@pytest.mark.parametrize(
    ("script", "option", "here"),
    [
        ("serve", "--max-num-seqs", "engine.max_batch"),
        ("serve", "--seed=1", "engine.seed"),
        ("generate", "--seed", "seed"),
    ],
)
def test_options_with_dashes(script: str, option: str, here: str) -> None:
    command = [sys.executable, f"infer/{script}.py", option, "8"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    expected = f"error: {option.partition('=')[0]}: options are written key=value, without dashes; here {here}\n"
    assert (result.returncode, result.stderr) == (2, expected)


def test_every_word_names_a_key_that_exists() -> None:
    config = compose("serve", ServeConfig)
    for foreign in ("gpu_memory_utilization", "max_num_seqs", "kv_cache_dtype", "block_size", "max_model_len", "seed"):
        group, key = str(elsewhere(foreign)).split(".")
        assert hasattr(getattr(config, group), key), foreign


def test_the_context_is_shortened_and_never_lengthened(tiny_target_folder: Path) -> None:
    engine = load(tiny_target_folder, EngineConfig(max_model_len=24))
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=100, ignore_eos=True))
    assert (len(completion.token_ids), completion.finish_reason) == (21, "length")
    with pytest.raises(ValueError, match="24"):
        engine.generate([[5] * 25], SAMPLED)
    with pytest.raises(ValueError, match=r'max_model_len=1024: .* 512 tokens.*"rope_type": "yarn", "factor": 2'):
        load(tiny_target_folder, EngineConfig(max_model_len=1024))


def test_seeds_follow_from_the_engines(tiny_target_folder: Path) -> None:
    def answers(seed: int | None) -> list[tuple[int, list[int]]]:
        engine = load(tiny_target_folder, EngineConfig(seed=seed))
        params = [SAMPLED, SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, n=2), SAMPLED]
        return [(answer.seed, answer.token_ids) for answer in engine.generate([PROMPT] * 3, params)]

    first = answers(1)
    assert answers(1) == first
    assert len({seed for seed, _ in first}) == 4
    assert {seed for seed, _ in answers(2)}.isdisjoint(seed for seed, _ in first)
    assert answers(None) != answers(None)


def test_a_share_of_the_memory(tiny_target_folder: Path) -> None:
    plain = load(tiny_target_folder).memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for config, pages in ((EngineConfig(), plain.pages), (EngineConfig(max_batch=256), 256 * 512 // 16)):
        config.memory_share = 0.5
        assert load(tiny_target_folder, config).memory.pages == pages  # the default holds no more than 65,536 tokens
    few = EngineConfig(memory_share=(plain.weights + plain.workspace + 2 * MIB) / total)
    memory = load(tiny_target_folder, few).memory
    assert memory.kv < 2 * MIB < plain.kv
    with pytest.raises(ValueError, match=r"0 MiB are left of engine\.memory_share=1e-09"):
        load(tiny_target_folder, EngineConfig(memory_share=1e-9))


def test_the_rule_of_requests_that_name_none(tiny_target_folder: Path, tiny_head_folder: Path) -> None:
    def accepted(params: SamplingParams, **drafts: Any) -> tuple[str, int, int]:
        engine = load(tiny_target_folder, head=tiny_head_folder, max_draft_tokens=4, **drafts)
        (answer,) = engine.generate([PROMPT], params)
        return answer.acceptance, answer.stats.accepted, answer.stats.drafted

    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    rule, exact, _ = accepted(params)
    assert rule == "exact"
    rule, everything, drafted = accepted(params, acceptance="typical", posterior_threshold=0.0)
    assert (rule, everything > exact, drafted - everything < 4) == ("typical", True, True)  # but for the last step
    asked = replace(params, acceptance="rejection")
    assert accepted(asked, acceptance="typical", posterior_threshold=0.0)[:2] == ("exact", exact)
    strict = replace(params, posterior_threshold=1.0, posterior_alpha=1.0)
    assert accepted(strict, acceptance="typical", posterior_threshold=0.0)[1] < everything
