"""The decoder layer of a head as a LlamaConfig states it, flat or as a section of another config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.config import TargetConfig
from models.fields import MAX_LAYERS, Fields

# (pattern of the tensor, the keys that its presence and shape follow from), for every format built on such a layer
BLAME = (
    (r"embed_tokens", ("vocab_size", "hidden_size")),
    (r"(q|k|v|o)_proj\.bias", ("attention_bias", "qkv_bias", "num_attention_heads", "num_key_value_heads", "head_dim")),
    (r"(q|o)_proj", ("num_attention_heads", "head_dim", "hidden_size", "num_hidden_layers")),
    (r"(k|v)_proj", ("num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers")),
    (r"(gate|up|down)_proj\.bias", ("mlp_bias", "intermediate_size", "hidden_size")),
    (r"(gate|up|down)_proj", ("intermediate_size", "hidden_size", "num_hidden_layers")),
    (r"layers\.", ("num_hidden_layers", "hidden_size")),
)


def read_layer(fields: Fields, notes: list[str]) -> TargetConfig:
    """Read every key of a LlamaConfig, with LlamaConfig's defaults where it has one.

    Raises ValueError naming the key that is missing, or that states another layer than Llama's.
    """
    if fields.values.get("use_sliding_window") is False:
        fields.ignore("sliding_window")  # which Qwen2's configs state all the same
    else:
        fields.only("sliding_window")
    fields.only("use_sliding_window", False)
    kinds = fields.take("layer_types", list, [])
    fields.only("layer_types", ["full_attention"] * len(kinds))
    fields.only("is_causal", True)
    layer = read_sizes(fields, notes)
    if fields.take("qkv_bias", bool, False):  # of EAGLE heads for Qwen2, which have none on the output projection
        layer = replace(layer, attention_bias=True)
    return layer


def read_sizes(fields: Fields, notes: list[str]) -> TargetConfig:
    """Read the keys that the layers of Llama and Qwen3 share: all but those of norms and windows."""
    section: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"):
        section[key] = fields.size(key)
    section["num_hidden_layers"] = fields.size("num_hidden_layers", limit=MAX_LAYERS)
    section["num_key_value_heads"] = fields.size("num_key_value_heads", section["num_attention_heads"])
    section["head_dim"] = fields.size("head_dim", section["hidden_size"] // section["num_attention_heads"])
    section["max_position_embeddings"] = fields.size("max_position_embeddings", 2048)
    section["bos_token_id"] = fields.maybe("bos_token_id", int)
    section["rms_norm_eps"] = fields.positive("rms_norm_eps", 1e-6)
    for key in ("attention_bias", "mlp_bias"):
        section[key] = fields.take(key, bool, False)
    for key in ("rope_scaling", "rope_parameters"):
        section[key] = fields.maybe(key, dict)
    if fields.values.get("rope_theta") is None and "rope_theta" not in (section["rope_parameters"] or {}):
        notes.append("rope_theta is not stated: 10000, LlamaConfig's default, which old EAGLE heads rely on")
    section["rope_theta"] = fields.positive("rope_theta", 10000.0)
    several = isinstance(fields.values.get("eos_token_id"), list)
    section["eos_token_id"] = fields.numbers("eos_token_id") if several else fields.maybe("eos_token_id", int)
    fields.only("hidden_act", "silu")
    fields.only("pretraining_tp", 1)
    fields.only("partial_rotary_factor", 1.0, 1)
    fields.only("quantization_config")
    try:
        layer = TargetConfig.from_json({key: value for key, value in section.items() if value is not None})
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{fields.name}: rope_scaling or rope_parameters: {error}") from error
    if layer.head_dim % 2:
        raise ValueError(f"{fields.name}: head_dim={layer.head_dim}: must be even, for the rotary embedding")
    return layer
