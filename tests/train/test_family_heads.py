"""Heads on targets other than Llama: training and serving agree.

DeepSeek's attention is of another kind than its heads'. Gemma scales its embedding for its own layers only, Granite its
residual stream and logits; recurrent layers have no keys (LFM2, Qwen3.5), and Qwen3.5's modules its gated attention;
OPT and GPT-BigCode add learned positions, of which heads see none; OPT-350M has projections beside embedding and LM
head, through which heads read both; gpt-oss has sinks and windows, which heads do not.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams, SpeculationStats
from models.targets import load_target
from tests.heads import ONE_OF_EACH, make_head, memorise
from tests.hub_cache import tiny_tokenizer
from tests.pairwise import parametrize_each
from tests.train.conftest import STEPS, write_family
from tests.train.running import SETTINGS, run
from train.data.sequences import Sequences
from train.evaluation import simulate
from train.features.online import compute_features

UNNAMED = {"intermediate_size": None, "num_key_value_heads": None}  # keys that a family does not have
PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
SIZES = {"head_dim": 32, "sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1}
DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 3,
}  # fmt: skip
QWEN = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "full_attention_interval": 2, "mtp_num_hidden_layers": 0,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma3TextConfig", SIZES),
    "granite": ("GraniteConfig", {**MULTIPLIERS, "logits_scaling": 4.0}),
    "deepseek v3": ("DeepseekV3Config", DEEPSEEK),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gpt oss": ("GptOssConfig", {"head_dim": 32, "num_local_experts": 4, "sliding_window": 16}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "eos_token_id": 2, "sliding_window": 16, "rope_parameters": PART}),
    "qwen3.5 moe": (
        "Qwen3_5MoeTextConfig",
        QWEN | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "num_hidden_layers": 6, "init_std": 0.2, "bos_token_id": 0, "eos_token_id": 0, **UNNAMED},
    ),
    "opt as 350m": (
        "OPTConfig",
        {
            **{"ffn_dim": 96, "num_hidden_layers": 6, "initializer_range": 0.6, "bos_token_id": 0, "eos_token_id": 0},
            **{"word_embed_proj_dim": 32, "do_layer_norm_before": False, "tie_word_embeddings": False, **UNNAMED},
        },
    ),
    "gpt bigcode": (
        "GPTBigCodeConfig",
        {"n_inner": 96, "num_hidden_layers": 6, "bos_token_id": 0, "eos_token_id": 0, **UNNAMED},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "block_multiple_of": 32}),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        {"layer_types": ["linear_attention", "full_attention"] * 4, "head_dim": 32, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "pad_token_id": 0},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, options = FAMILIES[request.param]
    return write_family(kind, tmp_path_factory.mktemp(request.param.replace(" ", "-")), **options)


@parametrize_each(
    {"family_folder": list(FAMILIES), "variant": ["eagle, the target's embedding", "eagle3", "mtp"]},
    indirect=["family_folder"],
)
def test_a_head_drafts_as_it_was_trained(variant: str, family_folder: Path) -> None:
    drafts_as_trained(variant, family_folder)


@pytest.mark.parametrize("family_folder", ["opt as 350m"], indirect=True)
@pytest.mark.parametrize(
    "variant", [name for name in ONE_OF_EACH if name not in ("eagle3", "mtp", "lstm", "draft-model")]
)
def test_every_head_reads_projected_embeddings(variant: str, family_folder: Path) -> None:
    drafts_as_trained(variant, family_folder)


@pytest.mark.parametrize(
    ("family_folder", "head"),
    [
        *((family, "eagle3") for family in ("gemma", "granite", "deepseek v3", "gpt oss", "opt as 350m", "qwen3.5")),
        ("lfm2", "dspark"),
    ],
    indirect=["family_folder"],
)
def test_the_commands_train_and_serve_a_head_of_each_family(
    family_folder: Path, head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From prompts to an exported head, whose features the engine recorded, and from there to the server's."""
    folder = tmp_path / "target"
    shutil.copytree(family_folder, folder)
    tiny_tokenizer().save_pretrained(folder)
    settings = [*SETTINGS, f"model.path={folder}", f"output_dir={tmp_path}", "features=offline", "steps=2", "run=one"]
    short = ["head.aux_layers=[1,3,5]", "data.num_sequences=8", "eval_prompts=2", "eval_draft_tokens=2"]
    if head == "dspark":
        settings = [key for key in settings if not key.startswith("objective.steps")]
        run(settings, *short, "head=dspark", "head.block_size=4", "head.num_layers=2")
    else:
        run(settings, *short, "objective.steps=2")
    assert re.search(r"those of \d sequences were taken while they were generated", capsys.readouterr().err)
    model = ModelConfig(name="demo", path=str(folder), dtype="float32")
    engine = Engine.load(model, head, output_dir=str(tmp_path), proposer=ProposerConfig(name="head", adaptive=False))
    prompts, params = [[5, 6, 7, 8], list(range(20, 60))], SamplingParams(max_tokens=12, ignore_eos=True)
    drafted = engine.generate(prompts, params)
    engine.set_proposer("none")
    assert [c.token_ids for c in drafted] == [c.token_ids for c in engine.generate(prompts, params)]
    assert all(c.stats.drafted for c in drafted)


def drafts_as_trained(variant: str, family_folder: Path) -> None:
    torch.manual_seed(1)  # torch draws the first biases of some heads
    head = make_head(load_target(str(family_folder)), variant)
    limits = EngineConfig(max_tokens_in_cache=2048, max_batch=8)
    drafts = ProposerConfig(name="head", max_draft_tokens=STEPS)
    engine = Engine(load_target(str(family_folder)), proposer="none", config=limits, proposer_config=drafts)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 384, (6 + 4 * index,), generator=generator).tolist() for index in range(4)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = engine.generate(prompts, params)
    rows = [(a.prompt_ids + a.token_ids, [False] * len(a.prompt_ids) + [True] * len(a.token_ids)) for a in plain]
    responses = Sequences.of(rows)
    memorise(head, engine.target, responses, STEPS, rounds=100)
    batch = responses.batch(range(len(rows)))
    simulated = simulate(head, batch, compute_features(engine.target, batch, head.config.aux_layers), STEPS)
    engine.set_proposer("head", head)
    completions = engine.generate(prompts, params)
    assert [c.token_ids for c in completions] == [a.token_ids for a in plain]
    served = SpeculationStats()
    for completion in completions:
        served.merge(completion.stats)
    assert simulated.acceptance_length > 1.4
    assert simulated.acceptance_length == pytest.approx(served.acceptance_length, rel=1e-6)
