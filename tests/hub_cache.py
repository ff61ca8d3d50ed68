"""A cache of the model hub that holds tiny random models under published ids, for commands that name these ids.

Each target has the architecture of the published one, each head its keys and tensor names (tests/formats); nothing is
downloaded. Ids of one family share a folder.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.mtp_names import layout_of
from tests.conftest import END, VOCAB_SIZE, train_tiny_tokenizer
from tests.formats.published import PUBLISHED
from tests.formats.source import Source
from tests.formats.sources import SOURCES
from tests.unit import quantized_writers
from tests.vocabularies import write_tokenizer

COMMIT = "0" * 40
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # so that the choice of a token is never near
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EIGHT = {"num_hidden_layers": 8}  # the layers that published heads read differ from eight on
DELTA_NET = {
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 8, "mtp_num_hidden_layers": 1},
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 24}
# family -> the config of transformers, what differs from SIZES, ids
TARGETS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": (
        "LlamaConfig",
        EIGHT,
        (
            *("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-13b-chat-hf", "meta-llama/Llama-2-70b-chat-hf"),
            *("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-70B-Instruct"),
            *("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
            "meta-llama/Llama-3.3-70B-Instruct",
            *("lmsys/vicuna-7b-v1.3", "lmsys/vicuna-13b-v1.3", "lmsys/vicuna-33b-v1.3"),
            *("codellama/CodeLlama-34b-Instruct-hf", "ibm-granite/granite-7b-instruct"),
            *("ibm-granite/granite-3b-code-instruct", "ibm-granite/granite-8b-code-instruct"),
        ),
    ),
    "qwen2": ("Qwen2Config", {}, ("Qwen/Qwen2-7B-Instruct", "Qwen/Qwen2-72B-Instruct")),
    "qwen3": (
        "Qwen3Config",
        {**EIGHT, "head_dim": 16},
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B"),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**EIGHT, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        ("Qwen/Qwen3-30B-A3B-Instruct-2507",),
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**EIGHT, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
        ("openai/gpt-oss-20b",),
    ),
    "mimo": ("Qwen2Config", {}, ("XiaomiMiMo/MiMo-7B-Base",)),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16},
            **{"qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 32},
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2},
        },
        ("deepseek-ai/DeepSeek-V3",),
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, ("LiquidAI/LFM2-1.2B",)),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {**EIGHT, **DELTA_NET, "full_attention_interval": 4},
        ("Qwen/Qwen3.5-4B",),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **{**DELTA_NET, "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        },
        ("Qwen/Qwen3-Next-80B-A3B-Instruct",),
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA2, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0},
        ("ibm-granite/granite-4.0-h-350m",),
    ),
    "falcon_h1": ("FalconH1Config", {**MAMBA2, "mamba_d_ssm": 128}, ("tiiuae/Falcon-H1-0.5B-Instruct",)),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24},
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        },
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2",),
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, ("mistralai/Mixtral-8x7B-Instruct-v0.1",)),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "init_std": 0.2, "tie_word_embeddings": True},
        ("facebook/opt-6.7b",),
    ),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {"n_inner": 96, "tie_word_embeddings": True},
        ("ibm-granite/granite-20b-code-instruct-8k",),
    ),
}
# family -> the architecture of its targets, which ship a module for multi-token prediction
SHIPS_MODULE = {
    "mimo": "MiMoForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
# family -> the id of a smaller model with other weights, which drafts
DRAFTS = {"opt": "facebook/opt-125m", "qwen3": "Qwen/Qwen3-0.6B", "llama": "meta-llama/Llama-3.2-3B-Instruct"}
PARALLEL, OTHER_WORDS = "amd/PARD-Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct"
VICUNA, DFLASH = PUBLISHED["yuhuili/EAGLE-Vicuna-7B-v1.3"], PUBLISHED["z-lab/Qwen3-8B-DFlash-b16"]
LLAMA3 = PUBLISHED["yuhuili/EAGLE-LLaMA3-Instruct-8B"]
DSPARK, LSTM = SOURCES["deepspec"], SOURCES["arctic-lstm"]
MLP = PUBLISHED["ibm-granite/granite-7b-instruct-accelerator"]
# id -> a head of its layout
HEADS: dict[str, Source] = {
    **PUBLISHED,
    "yuhuili/EAGLE-Vicuna-13B-v1.3": VICUNA,
    "yuhuili/EAGLE-llama2-chat-13B": PUBLISHED["yuhuili/EAGLE-llama2-chat-7B"],
    "yuhuili/EAGLE-LLaMA3-Instruct-70B": LLAMA3,
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": LLAMA3,
    "yuhuili/EAGLE-Qwen2-72B-Instruct": PUBLISHED["yuhuili/EAGLE-Qwen2-7B-Instruct"],
    **{
        f"RedHatAI/{target}-speculator.eagle3": PUBLISHED["RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"]
        for target in (
            *("Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B-Instruct-2507"),
            *("Llama-3.3-70B-Instruct", "gpt-oss-20b"),
        )
    },
    "RedHatAI/Qwen3-8B-speculator.peagle": SOURCES["speculators p-eagle"],
    "RedHatAI/Qwen3-8B-speculator.dflash": SOURCES["speculators dflash"],
    "RedHatAI/Qwen3-8B-speculator.dflash2": SOURCES["speculators dflash2"],
    "path/fastmtp": SOURCES["speculators-mtp"],
    **dict.fromkeys(
        ("z-lab/Qwen3-8B-DFlash-b16", "z-lab/Qwen3.5-4B-DFlash"),
        replace(DFLASH, config=DFLASH.config | {"block_size": 16}),
    ),
    "deepseek-ai/dspark_qwen3_4b_block7": replace(DSPARK, config=DSPARK.config | {"block_size": 7}),
    "Snowflake/Arctic-LSTM-Speculator-Llama-3.1-8B-Instruct": LSTM,
    **{
        f"ibm-{owner}-accelerator": MLP
        for owner in (
            *("ai-platform/llama-13b", "ai-platform/llama2-70b", "ai-platform/llama3-8b", "ai-platform/llama3-70b"),
            *("ai-platform/codellama-34b", "granite/granite-3b-code-instruct", "granite/granite-8b-code-instruct"),
        )
    },
    "your-username/Qwen3-8B-Domino-b16": replace(
        DFLASH, config=DFLASH.config | {"dflash_config": DFLASH.config["dflash_config"] | {"projector_type": "domino"}}
    ),
}
# id -> a config.json without weights, of what is refused before a tensor is read
CONFIGS: dict[str, dict[str, Any]] = {
    **{
        name: {"architectures": [architecture]}
        for name, architecture in {
            "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash": "MiMoV2ForCausalLM",
            "deepseek-ai/DeepSeek-V4-Flash-DSpark": "DeepseekV4ForCausalLM",
            "google/gemma-4-E2B-it": "Gemma4ForConditionalGeneration",
            "chiennv/Orthrus-Qwen3-1.7B": "OrthrusForCausalLM",
        }.items()
    },
    "gg-hf-am/gemma-4-E2B-it-assistant": {"model_type": "gemma4_assistant"},
    "amd/Gumiho-llama3-8b": {"model_type": "gumiho", "model": LLAMA3.config},
    "path/lilicorr": DFLASH.config | {"architectures": ["LiLiCorrDraftModel"]},
    "path/xpress": DFLASH.config | {"architectures": ["XPressDraftModel"]},
}
FP8 = quantized_writers.FP8 | {"weight_block_size": [128, 128]}


@cache
def tiny_tokenizer() -> Any:
    import transformers

    backend = train_tiny_tokenizer()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END)


def write_target(folder: Path, kind: str, changes: dict[str, Any], seed: int = 5) -> Path:
    import transformers

    tiny_tokenizer().save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, kind)(**SIZES | changes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def ship_module(folder: Path, architecture: str) -> None:
    """Add a module for multi-token prediction whose layer is the target's last."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    layout, size = layout_of(architecture), config["hidden_size"]
    last, (prefix,) = (
        f"model.layers.{config['num_hidden_layers'] - 1}.",
        layout.prefixes(config["num_hidden_layers"], 1),
    )
    first = prefix + layout.layer_prefix
    module = {name.replace(last, first): value.clone() for name, value in tensors.items() if name.startswith(last)}
    for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"):
        weight = torch.eye(size).repeat(1, 2) if name == "input_proj" else torch.full((size,), 0.5)
        module[f"{prefix}{layout.renamed.get(name, name)}.weight"] = weight
    save_file(tensors | module, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": [architecture], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def put_beside_vision(folder: Path) -> None:
    """Make a checkpoint of Qwen3.5's language model one of a model that reads images too, as they are published."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    renamed["model.visual.patch_embed.proj.weight"] = torch.ones(8, 3)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    names = [str(name).replace("ForCausalLM", "ForConditionalGeneration") for name in config.pop("architectures")]
    outer = {"architectures": names, "model_type": "qwen3_5", "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": False, "text_config": config}))


def write_hub(hub: Path, content: Path) -> None:
    """Write the folders to `content`, and links to them to `hub`, in the layout of huggingface_hub."""
    for family, (kind, changes, ids) in TARGETS.items():
        folder = write_target(content / family, kind, changes)
        if family in SHIPS_MODULE:
            ship_module(folder, SHIPS_MODULE[family])
        if family == "qwen3_5":
            put_beside_vision(folder)
        for name in ids:
            link(hub, name, folder)
    for family, name in DRAFTS.items():  # other weights than the target's
        kind, changes, _ = TARGETS[family]
        link(hub, name, write_target(content / f"{family} drafts", kind, changes | {"num_hidden_layers": 2}, seed=6))
    narrow, plain = content / "fp8", content / "plain"
    quantized_writers.write(content / "qwen3", FP8, quantized_writers.fp8_blocks(128, 128), narrow, plain)
    link(hub, "Qwen/Qwen3-4B-FP8", narrow)
    parallel = write_target(content / "parallel", "Qwen3Config", {"head_dim": 16}, seed=6)
    config = json.loads((parallel / "config.json").read_text())
    (parallel / "config.json").write_text(json.dumps(config | {"pard_token": VOCAB_SIZE - 1}))
    link(hub, PARALLEL, parallel)
    other = write_target(content / "other words", "LlamaConfig", {"vocab_size": 512})
    link(hub, OTHER_WORDS, write_tokenizer("llama", content / "words", source=other))
    written: dict[str, Path] = {}
    for name, source in HEADS.items():
        key = repr(source)
        if key not in written:
            written[key] = source.write(content / name.replace("/", "--"), seed=3)
        link(hub, name, written[key])
    for name, config in CONFIGS.items():
        folder = content / name.replace("/", "--")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        link(hub, name, folder)


def link(hub: Path, name: str, folder: Path) -> None:
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / COMMIT).symlink_to(folder, target_is_directory=True)
