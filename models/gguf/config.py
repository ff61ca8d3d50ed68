"""The architecture keys of a GGUF file, under the names of Hugging Face's config.json.

The `read_config` of each family (models/targets/) turns the result into a TargetConfig, so that a file and a folder are
checked alike. An unknown key of the architecture is an error: it may change the logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from models.config import RopeConfig
from models.gguf import hybrid, mamba2
from models.gguf.file import GgufFile
from models.layers import rope_frequencies

ARCHITECTURE = "general.architecture"
CLASSES = {  # architecture -> Hugging Face's class and model_type
    "llama": ("LlamaForCausalLM", "llama"),  # Mistral and SmolLM too
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "granite": ("GraniteForCausalLM", "granite"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "starcoder": ("GPTBigCodeForCausalLM", "gpt_bigcode"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "falcon-h1": ("FalconH1ForCausalLM", "falcon_h1"),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), ("NemotronHForCausalLM", "nemotron_h")),
}
MIXTRAL = ("MixtralForCausalLM", "mixtral")  # of "llama" with experts
DEEPSEEK_V3 = ("DeepseekV3ForCausalLM", "deepseek_v3")  # of "deepseek2" whose router is a sigmoid
SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
FORWARD = {"feed_forward_length": "intermediate_size"}
USED = {"expert_used_count": "num_experts_per_tok"}
QWEN_MOE = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size", **USED}
EXPERTS = {  # by architecture
    **dict.fromkeys(("qwen3moe", "qwen3next", "qwen35moe"), QWEN_MOE),
    "lfm2moe": {**QWEN_MOE, "leading_dense_block_count": "num_dense_layers"},
    "gpt-oss": {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size", **USED},
    "deepseek2": {
        "expert_count": "n_routed_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
        **USED,
    },
}
EPSILON = "attention.layer_norm_rms_epsilon"
STARCODER = {"feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"}
READ = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "vocab_size",
)  # fmt: skip
GEMMA = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
MULTIPLIERS = {
    "logit_scale": "logits_scaling",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
}
WINDOW = ("attention.sliding_window",)
PHI = (*WINDOW, "rope.scaling.attn_factor")
DEEPSEEK = (
    "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla", "expert_gating_func",
    "expert_group_count", "expert_group_used_count", "expert_weights_norm", "expert_weights_scale",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
OF_ONE = {  # keys of one architecture alone
    "gemma3": GEMMA,
    "granite": tuple(MULTIPLIERS),
    "phi3": PHI,
    "gpt-oss": WINDOW,
    "deepseek2": DEEPSEEK,
    **hybrid.KEYS,
    **mamba2.KEYS,
    "granitehybrid": (*mamba2.KEYS["granitehybrid"], *MULTIPLIERS, *USED),
}
TEXTS = ("rope.scaling.type",)
FRACTIONS = ("epsilon", "freq_base", "freq_base_swa", "factor", "scale", "beta_fast", "beta_slow", "multiplier")
IGNORED = ("rope.scaling.finetuned",)  # says how the scaling was obtained
FLAGS = (*IGNORED, "expert_weights_norm")
MAY_BE_ZERO = (
    *("phi3.attention.sliding_window", "expert_shared_count", "leading_dense_block_count", hybrid.MODULES),
    *("granitehybrid.expert_count", "granitehybrid.expert_used_count"),
)
# Keys of other architectures or options, with the values that are equivalent to omitting them.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_group_count": (1,),
    "expert_weights_norm": (True,),  # what qwen3moe does
    "expert_weights_scale": (0.0, 1.0),
}
ROPE_FREQS = "rope_freqs.weight"
LONGROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}  # of Phi
BETAS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}  # of YaRN
# Published with Llama 3.1 and later: frequency factors and original context. The file stores only their result.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
WINDOW_PATTERN, LOCAL_BASE = 6, 10000.0  # of Gemma 3, whose files do not state them


def config_json(file: GgufFile) -> dict[str, Any]:
    """Return the keys of a config.json. Raises ValueError naming file and key for what is missing or not supported."""
    architecture = file.need(ARCHITECTURE)
    if architecture not in CLASSES:
        raise ValueError(f"{file.path}: {ARCHITECTURE}={architecture!r}: is not supported; one of {', '.join(CLASSES)}")
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in file.keys.items() if key.startswith(prefix)}
    recurrent = hybrid.take_lists(file, architecture, values) if architecture in hybrid.NAMES else []
    lists = mamba2.per_layer(file, architecture, values)
    experts = EXPERTS.get(architecture, {})
    if mixtral := architecture == "llama" and bool(values.get("expert_count")):
        experts = {"expert_count": "num_local_experts", **USED}
    translated = {**SIZES, **FORWARD, **experts}
    if EPSILON not in values and "attention.layer_norm_epsilon" in mamba2.KEYS.get(architecture, ()):
        del translated[EPSILON]
    if architecture == "starcoder":
        translated = {key: name for key, name in translated.items() if key != EPSILON} | STARCODER
    supported = {*translated, *READ, *IGNORED, *OF_ONE.get(architecture, ())}
    for key, value in values.items():
        if key not in supported and value not in NEUTRAL.get(key, ()):
            raise ValueError(
                f"{file.path}: {architecture}.{key}={shown(value)}: is not supported, and may change the logits"
            )
        if key in supported and key not in lists:
            check_type(file, f"{architecture}.{key}", value)
    name, kind = MIXTRAL if mixtral else CLASSES[architecture]
    if architecture == "deepseek2" and values.get("expert_gating_func") == SIGMOID:
        name, kind = DEEPSEEK_V3
    config: dict[str, Any] = {"architectures": [name], "model_type": kind}
    for key, name in translated.items():
        if key in FORWARD and architecture in EXPERTS and key not in values:
            continue
        config[name] = values[key] if key in lists else file.need(f"{architecture}.{key}")
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = kv_heads = values.get("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise ValueError(
            f"{file.path}: {prefix}attention.head_count={heads}: is no multiple of head_count_kv={kv_heads}"
        )
    rotated = values.pop("rope.dimension_count", None) if architecture in ("phi3", *hybrid.QWEN) else None
    if architecture == "deepseek2":
        config |= latent(file, values, config)
    else:
        config["head_dim"] = head_size(file, architecture, values, config)
    config["vocab_size"] = vocabulary(file, values.get("vocab_size"))
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = any(f"blk.0.attn_{kind}.bias" in file.tensors for kind in ("q", "qkv"))
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    config["rope_theta"] = values.get("rope.freq_base", 10000.0)
    config["rope_scaling"] = scaling(file, architecture, values, config)
    if architecture == "qwen3moe":
        config["norm_topk_prob"] = True
        config.setdefault("intermediate_size", config["moe_intermediate_size"])
    if architecture == "gemma3":
        config |= gemma(file, values, config)
    if architecture in mamba2.LAYERS:
        config |= mamba2.config_keys(file, architecture, values, lists, config)
    if architecture in ("granite", "granitehybrid"):
        config |= multipliers(file, architecture, values, config)
    if architecture == "phi3":
        config["sliding_window"] = file.need("phi3.attention.sliding_window") or None
        config |= longrope(file)
    if architecture in ("phi3", *hybrid.QWEN):
        config["partial_rotary_factor"] = (rotated or config["head_dim"]) / config["head_dim"]
    if recurrent:
        config |= hybrid.hybrid_json(file, architecture, values, config, recurrent)
    if architecture == "deepseek2" and config["rope_scaling"]:
        magnitude = round(10 * file.need("deepseek2.rope.scaling.yarn_log_multiplier"), 6)  # a tenth of it in fp32
        config["rope_scaling"] |= {"mscale": magnitude, "mscale_all_dim": magnitude}
    if architecture == "gpt-oss":  # the file does not state that the bounds of YaRN's ramp are not rounded
        config["sliding_window"] = file.need("gpt-oss.attention.sliding_window")
        config["rope_scaling"] = {"rope_type": "default", **(config["rope_scaling"] or {}), "truncate": False}
    if architecture == "starcoder":  # llama.cpp approximates GELU, which the file does not state
        config |= {"activation_function": "gelu_pytorch_tanh", "multi_query": kv_heads == 1}
    ends = ("bos_token_id", "eos_token_id")
    config |= {key: file.keys[f"tokenizer.ggml.{key}"] for key in ends if f"tokenizer.ggml.{key}" in file.keys}
    return config


def check_type(file: GgufFile, key: str, value: object) -> None:
    """Raise ValueError for a value that is not of the type that its key requires: text, number or size."""
    if key.endswith(TEXTS):
        if not isinstance(value, str):
            raise ValueError(f"{file.path}: {key}={shown(value)}: must be a text")
    elif isinstance(value, list):
        raise ValueError(f"{file.path}: {key}={shown(value)}: layers that differ in it are not supported")
    elif key.endswith(FRACTIONS):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{file.path}: {key}={shown(value)}: must be a positive number")
    elif not key.endswith(FLAGS) and (type(value) is not int or value < (not key.endswith(MAY_BE_ZERO))):
        raise ValueError(f"{file.path}: {key}={shown(value)}: must be a whole number above 0")


def head_size(file: GgufFile, architecture: str, values: dict[str, Any], config: dict[str, Any]) -> int:
    default = config["hidden_size"] // config["num_attention_heads"]
    size = values.get("attention.key_length", values.get("rope.dimension_count", default))
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, size) != size:
            raise ValueError(
                f"{file.path}: {architecture}.{key}={values[key]}: must be the size of a head, {size}; "
                "a rotary embedding over part of it and values of another size are not supported"
            )
    return size


def vocabulary(file: GgufFile, stated: int | None) -> int:
    name = "token_embd.weight"
    if name not in file.tensors:
        raise ValueError(f"{file.path}: the tensor {name} is missing")
    rows = file.tensors[name].shape[0]
    if stated is not None and stated != rows:
        raise ValueError(f"{file.path}: vocab_size={stated}, but {name} has {rows} rows")
    return rows


def scaling(file: GgufFile, architecture: str, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling`. Raises ValueError for a type, or for factors, that are not supported."""
    factor = values.get("rope.scaling.factor") or None
    kind = values.get("rope.scaling.type", "none" if factor is None else "linear")  # llama.cpp's default
    if ROPE_FREQS in file.tensors:
        if kind != "none":
            raise ValueError(
                f"{file.path}: {ROPE_FREQS} beside {architecture}.rope.scaling.type={kind!r}: not supported"
            )
        return llama3_scaling(file, config)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "longrope" and architecture == "phi3":  # its section is made by `longrope`
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{file.path}: {architecture}.rope.scaling.type={kind!r}: is not supported; one of none, linear, yarn"
        )
    if factor is None:
        raise ValueError(
            f"{file.path}: {architecture}.rope.scaling.factor: is missing, rope.scaling.type={kind} needs it"
        )
    section = {"rope_type": kind, "factor": factor}
    original = values.get("rope.scaling.original_context_length")
    if kind == "yarn":
        section |= {name: values[key] for name, key in BETAS.items() if key in values}
        section |= {} if original is None else {"original_max_position_embeddings": original}
    return section


def llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `rope_scaling` section of Llama 3.1 and later.

    Their files hold the divisor of each frequency, `[head_dim / 2]`. Raises ValueError where the divisors do not follow
    from Llama 3's scaling.
    """
    factors = file.read(ROPE_FREQS, torch.float32)
    section = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    theta, size = config["rope_theta"], config["head_dim"]
    scaled, _ = rope_frequencies(RopeConfig.from_json({"rope_theta": theta, "rope_scaling": section}), size, 0)
    plain, _ = rope_frequencies(RopeConfig(theta), size, 0)
    if factors.shape != plain.shape or not torch.allclose(plain / factors, scaled, rtol=1e-4):
        raise ValueError(f"{file.path}: {ROPE_FREQS}: is no scaling of Llama 3's kind, and not supported")
    return section


def gemma(file: GgufFile, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return Gemma 3's additional keys. `query_pre_attn_scalar` is the head size except in 27B, which has 62 layers."""
    pattern = values.get("attention.sliding_window_pattern", WINDOW_PATTERN)
    kinds = ["sliding_attention", "full_attention"]
    layers = range(config["num_hidden_layers"])
    heads = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.need("gemma3.attention.sliding_window"),
        "layer_types": [kinds[(layer + 1) % pattern == 0] for layer in layers],
        "rope_local_base_freq": values.get("rope.freq_base_swa", LOCAL_BASE),
        "query_pre_attn_scalar": heads if config["num_hidden_layers"] == 62 else config["head_dim"],
        "rope_theta": values.get("rope.freq_base", 1_000_000.0),
    }


def longrope(file: GgufFile) -> dict[str, Any]:
    """Return Phi's keys of longrope, none where the file does not have it. Raises ValueError for a missing tensor."""
    missing = [name for name in LONGROPE.values() if name not in file.tensors]
    if len(missing) == len(LONGROPE) and file.keys.get("phi3.rope.scaling.type") != "longrope":
        return {}
    if missing:
        raise ValueError(f"{file.path}: the tensor {missing[0]} is missing")
    section = {key: file.read(name, torch.float32).tolist() for key, name in LONGROPE.items()}
    section |= {"rope_type": "longrope", "attention_factor": file.need("phi3.rope.scaling.attn_factor")}
    original = file.need("phi3.rope.scaling.original_context_length")
    return {"rope_scaling": section, "original_max_position_embeddings": original}


def latent(file: GgufFile, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the additional keys of DeepSeek. Newer files state the sizes of the latent as those of one KV head."""
    function = values.get("expert_gating_func", SOFTMAX)
    if function not in (SOFTMAX, SIGMOID):
        raise ValueError(
            f"{file.path}: deepseek2.expert_gating_func={function}: is not supported; {SOFTMAX} or {SIGMOID}"
        )
    sizes = "deepseek2.attention.%s_length" + ("_mla" if "attention.key_length_mla" in values else "")
    rotated, groups = config["qk_rope_head_dim"], values.get("expert_group_count", 1)
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "qk_nope_head_dim": file.need(sizes % "key") - rotated,
        "v_head_dim": file.need(sizes % "value"),
        "q_lora_rank": values.get("attention.q_lora_rank"),
        "scoring_func": "sigmoid" if function == SIGMOID else "softmax",
        "topk_method": "noaux_tc" if function == SIGMOID else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": values.get("expert_group_used_count", 1),
        "norm_topk_prob": values.get("expert_weights_norm", False),
        "routed_scaling_factor": values.get("expert_weights_scale") or 1.0,
        "num_nextn_predict_layers": 0,
    }


def multipliers(file: GgufFile, architecture: str, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return Granite's multipliers; llama.cpp leaves those out that are absent or zero."""
    file.need(f"{architecture}.logit_scale")
    if architecture == "granite" and values.get("rope.scaling.finetuned") is False:  # llama.cpp takes it so here
        raise ValueError(f"{file.path}: granite.rope.scaling.finetuned=False: attention without rotary embedding")
    absent = {"attention.scale": config["head_dim"] ** -0.5}
    return {name: values.get(key) or absent.get(key, 1.0) for key, name in MULTIPLIERS.items()}


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
