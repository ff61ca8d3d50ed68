"""Gemma 3's text model (Gemma3ForCausalLM): interleaved sliding-window and full attention, with separate rotary bases.

Four norms per layer, whose scale is 1 + weight; queries and keys normed; GELU (tanh) in the MLP; the embedding scaled
by sqrt(hidden size) and tied to the LM head.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from kernels.decoder import LayerParts
from models.attention import Attention
from models.config import RopeConfig, TargetConfig
from models.decoder import DecoderLayer, parts_of
from models.layers import GatedMLP, RMSNorm
from models.targets.llama import LlamaTarget
from models.targets.qwen2 import typed_windows

ACTIVATION = "gelu_pytorch_tanh"
# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "hidden_activation": ACTIVATION,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
BASES = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


class Gemma3Layer(DecoderLayer):
    """A decoder layer with a norm before and after both attention and MLP.

    `post_attention_layernorm` is of attention's output.
    """

    def __init__(self, config: TargetConfig, layer: int) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, gelu=True)
        super().__init__(config, layer, mlp)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = RMSNorm(size, eps, centered=True)
        self.post_feedforward_layernorm = RMSNorm(size, eps, centered=True)
        self.post_attention_layernorm.inside = self.post_feedforward_layernorm.inside = True

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotary, attention))
        normed, x = self.pre_feedforward_layernorm.add(x, attended)
        return x + self.post_feedforward_layernorm(self.mlp(normed))

    @property
    def forward_norm(self) -> RMSNorm:
        return self.pre_feedforward_layernorm

    def parts(self) -> LayerParts | None:
        return parts_of(
            self.self_attn,
            self.mlp,
            self.pre_feedforward_layernorm,
            input_norm=self.input_layernorm,
            attended_norm=self.post_attention_layernorm,
            mlp_norm=self.post_feedforward_layernorm,
        )


class Gemma3Target(LlamaTarget):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        config = DEFAULTS | config
        for key in CAPS:
            if config.get(key) is not None:
                raise ValueError(f"config.json: {key}={config[key]}: soft caps are not supported; Gemma 3 has none")
        if config.get("use_bidirectional_attention"):
            raise ValueError("config.json: use_bidirectional_attention=true: an encoder, which generates no text")
        if config["hidden_activation"] != ACTIVATION:
            raise ValueError(
                f"config.json: hidden_activation={config['hidden_activation']!r}: only {ACTIVATION!r} is supported"
            )
        for key in ("sliding_window", "query_pre_attn_scalar"):
            if not isinstance(config[key], (int, float)) or config[key] <= 0:
                raise ValueError(f"config.json: {key}={config[key]}: must be a number above 0")
        full, local = ropes(config)
        plain = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
        base = TargetConfig.from_json({**plain, "hidden_act": config["hidden_activation"]}, activation=ACTIVATION)
        return replace(
            base,
            qk_norm=True,
            centered_norms=True,
            windows=typed_windows(layer_types(config, base.num_layers), int(config["sliding_window"]), base.num_layers),
            attention_scale=float(config["query_pre_attn_scalar"]) ** -0.5,
            embedding_scale=math.sqrt(base.hidden_size),
            rope=full,
            local_rope=local,
        )

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> DecoderLayer:
        return Gemma3Layer(config, index)


def layer_types(config: dict[str, Any], num_layers: int) -> list[str]:
    """Return `layer_types`, by default full attention in every `sliding_window_pattern`-th layer, windows elsewhere."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]


def ropes(config: dict[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary configs of full-attention layers and of layers with a window.

    transformers 5 writes `rope_parameters` for each kind of layer; version 4 writes `rope_theta`, `rope_scaling` and
    `rope_local_base_freq`, where the scaling applies to full layers only. Raises ValueError for what is not supported.
    """
    by_type = config.get("rope_parameters") or {}
    unknown = set(by_type) - set(BASES)
    if unknown:
        raise ValueError(f"config.json: rope_parameters={by_type}: must have a section for each of {', '.join(BASES)}")
    legacy = {
        "full_attention": {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})},
        "sliding_attention": {"rope_theta": config.get("rope_local_base_freq")},
    }
    sections = {kind: by_type.get(kind) or legacy[kind] for kind in BASES}
    full, local = (
        RopeConfig.from_json({"rope_parameters": {**section, "rope_theta": section.get("rope_theta") or BASES[kind]}})
        for kind, section in sections.items()
    )
    return full, local
