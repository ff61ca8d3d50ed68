"""The decoder layer of a head as a LlamaConfig states it, flat or as a section of another config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.config import TargetConfig
from models.fields import MAX_LAYERS, Fields
from models.heads.layer_config import FULL, SLIDING
from models.targets.qwen2 import typed_windows

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


def read_layer(fields: Fields, notes: list[str], *, windows: bool = False) -> TargetConfig:
    """Read every key of a LlamaConfig, with LlamaConfig's defaults where it has one; `windows`: layers may have some.

    Raises ValueError naming the key that is missing, or that states another layer than Llama's.
    """
    if not windows:
        if fields.values.get("use_sliding_window") is False:
            fields.ignore("sliding_window")  # which Qwen2's configs state all the same
        else:
            fields.only("sliding_window")
        fields.only("use_sliding_window", False)
        kinds = fields.take("layer_types", list, [])
        fields.only("layer_types", [FULL] * len(kinds))
    fields.only("is_causal", True)
    layer = read_sizes(fields, notes)
    if windows:
        layer = replace(layer, windows=read_windows(fields, layer.num_layers))
    if fields.take("qkv_bias", bool, False):  # of EAGLE heads for Qwen2, which have none on the output projection
        layer = replace(layer, attention_bias=True)
    return layer


def read_sizes(fields: Fields, notes: list[str], *, partial: bool = False) -> TargetConfig:
    """Read the keys that the layers of Llama and Qwen3 share: all but those of norms and windows.

    `partial`: the rotary embedding may be over part of a head, which is not looked at.
    """
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
    if not partial:
        fields.only("partial_rotary_factor", 1.0, 1)
    fields.only("quantization_config")
    try:
        layer = TargetConfig.from_json({key: value for key, value in section.items() if value is not None})
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{fields.name}: rope_scaling or rope_parameters: {error}") from error
    if layer.head_dim % 2:
        raise ValueError(f"{fields.name}: head_dim={layer.head_dim}: must be even, for the rotary embedding")
    return layer


def read_windows(fields: Fields, count: int) -> tuple[int | None, ...]:
    """Read the window of each layer, () for none, from `layer_types`, `sliding_window` and `use_sliding_window`.

    Raises ValueError for kinds of layers that are unknown or not as many as the layers, and for a window that is
    missing or whose layers are not stated.
    """
    kinds, used = fields.maybe("layer_types", list), fields.maybe("use_sliding_window", bool)
    window = None if fields.values.get("sliding_window") is None else fields.size("sliding_window")
    fields.ignore("sliding_window")
    if kinds is None:
        if used:
            raise ValueError(f"{fields.name}: use_sliding_window=True: layer_types must say which layers have a window")
        return ()
    if any(not isinstance(kind, str) for kind in kinds):
        raise ValueError(f"{fields.name}: layer_types={kinds}: expected a list of strings")
    windows = typed_windows(kinds, window or 0, count)
    if not any(size is not None for size in windows):
        return ()
    if window is None or used is False:
        raise ValueError(
            f"{fields.name}: sliding_window={window}, use_sliding_window={used}: no window, though layer_types has "
            f"{SLIDING!r}"
        )
    return windows
