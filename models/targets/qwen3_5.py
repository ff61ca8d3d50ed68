"""Qwen3.5 and later (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, and the text models of their ForConditionalGeneration).

Gated delta nets, and attention with an output gate in every fourth layer. Of files that read images too, only the
language model is loaded; rows of text have equal positions in all sections of its rotary embedding (M-RoPE), which then
is a plain one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from models.config import ATTENTION, RECURRENT, ExpertsConfig, RecurrentConfig, TargetConfig
from models.decoder import DecoderLayer
from models.fields import Fields
from models.mixers.delta_net import GatedDeltaNet
from models.mixers.layers import GatedAttention, RecurrentLayer
from models.targets.experts import GatedShareExperts
from models.targets.lfm2 import typed_mixers
from models.targets.llama import LlamaTarget
from models.targets.phi3 import PARTIAL, rotary_dim

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {"head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25}
LAYER_TYPES = {"full_attention": ATTENTION, "linear_attention": RECURRENT}
OF_IMAGES = ("mrope_section", "mrope_interleaved")  # of the rotary embedding
# Llama's names, and ours of a recurrent layer -> Qwen's
NAMES = {
    r"^model\.language_model\.": "model.",
    r"\.mixer\.in_proj\.": ".linear_attn.in_proj_qkv.",
    r"\.mixer\.(z|b|a)_proj\.": r".linear_attn.in_proj_\1.",
    r"\.mixer\.conv\.": ".linear_attn.conv1d.",
    r"\.mixer\.o_proj\.": ".linear_attn.out_proj.",
    r"\.mixer\.": ".linear_attn.",
}


class Qwen35Target(LlamaTarget):
    renamed = NAMES
    unread = ("model.visual.",)

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        config = DEFAULTS | config
        fields = Fields(config)
        fields.only("attn_output_gate", True)
        fields.only("output_gate_type", "swish")  # of gated delta nets
        rope = fields.take("rope_scaling", dict, {}) | fields.take("rope_parameters", dict, {})
        factor = Fields({PARTIAL: rope.pop(PARTIAL, config[PARTIAL])})
        plain = {key: value for key, value in rope.items() if key not in OF_IMAGES}
        base = TargetConfig.from_json(config | {"rope_scaling": None, "rope_parameters": plain})
        return replace(
            base,
            qk_norm=True,
            output_gate=True,
            centered_norms=True,
            rotary_dim=rotary_dim(factor, base.head_dim),
            mixers=mixers(fields, base.num_layers),
            recurrent=delta_sizes(fields),
        )

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> nn.Module:
        mlp = config.experts and GatedShareExperts(config.hidden_size, config.experts)
        if config.mixes(index, ATTENTION):
            return DecoderLayer(config, index, mlp, GatedAttention(config, index))
        return RecurrentLayer(config, GatedDeltaNet(config, index), mlp)


class Qwen35MoeTarget(Qwen35Target):
    """Experts in place of the MLP, beside one that every token uses."""

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        fields = Fields(config)
        fields.only("mlp_only_layers")
        fields.only("decoder_sparse_step", 1)
        count, inner = fields.size("num_experts"), fields.size("moe_intermediate_size")
        experts = ExpertsConfig(
            count=count,
            active=fields.size("num_experts_per_tok", limit=count),
            intermediate_size=inner,
            normalize=fields.take("norm_topk_prob", bool, True),
            shared_size=fields.size("shared_expert_intermediate_size", 512),
            shared_gate=True,
        )
        return replace(super().read_config({"intermediate_size": inner} | config), experts=experts)


def mixers(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Read `layer_types` or `full_attention_interval`. Raises ValueError for another kind of layer."""
    interval = fields.size("full_attention_interval", 4)
    types = fields.maybe("layer_types", list) or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
    ]
    return typed_mixers(types, num_layers, LAYER_TYPES)


def delta_sizes(fields: Fields) -> RecurrentConfig:
    """Read the sizes of gated delta nets. Raises ValueError naming a key."""
    groups, heads = fields.size("linear_num_key_heads", 16), fields.size("linear_num_value_heads", 32)
    key_size, value_size = fields.size("linear_key_head_dim", 128), fields.size("linear_value_head_dim", 128)
    if heads % groups:
        raise ValueError(f"config.json: linear_num_value_heads={heads}: must be a multiple of {groups} key heads")
    return RecurrentConfig(
        channels=2 * groups * key_size + heads * value_size,
        taps=fields.size("linear_conv_kernel_dim", 4, limit=16),
        heads=heads,
        groups=groups,
        key_size=key_size,
        value_size=value_size,
    )
