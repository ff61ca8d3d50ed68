"""LFM2 and LFM2.5 (Lfm2ForCausalLM): gated short convolutions, and attention in some of the layers.

LFM2-MoE (Lfm2MoeForCausalLM) has experts after the first layers, chosen by a sigmoid plus a learned bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from models.config import ATTENTION, RECURRENT, ExpertsConfig, RecurrentConfig, TargetConfig
from models.decoder import DecoderLayer
from models.fields import Fields
from models.mixers.convolution import ShortConvolution
from models.mixers.layers import RecurrentLayer
from models.targets.deepseek import DeepseekExperts
from models.targets.llama import LlamaTarget

# Llama's names, and ours of a recurrent layer -> LFM2's
NAMES = {
    r"^model\.norm\.": "model.embedding_norm.",
    r"\.input_layernorm\.": ".operator_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.self_attn\.(q|k)_norm\.": r".self_attn.\1_layernorm.",
    r"\.self_attn\.o_proj\.": ".self_attn.out_proj.",
    r"\.mixer\.o_proj\.": ".conv.out_proj.",
    r"\.mixer\.": ".conv.",
    r"\.mlp\.gate\.e_score_correction_bias": ".feed_forward.expert_bias",
    r"\.mlp\.": ".feed_forward.",
    r"\.gate_proj\.": ".w1.",
    r"\.up_proj\.": ".w3.",
    r"\.down_proj\.": ".w2.",
}
LAYER_TYPES = {"full_attention": ATTENTION, "conv": RECURRENT}
THETA = 1_000_000.0


class Lfm2Target(LlamaTarget):
    renamed = NAMES

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        fields = Fields(config)
        tied = fields.take("tie_embedding", bool, fields.take("tie_word_embeddings", bool, True))
        rope = {} if config.get("rope_parameters") else {"rope_theta": fields.positive("rope_theta", THETA)}
        eps = {"rms_norm_eps": fields.positive("norm_eps", 1e-5), "tie_word_embeddings": tied}
        base = TargetConfig.from_json(config | rope | eps | {"intermediate_size": inner_size(fields)})
        fields.only("conv_bias", False)
        taps = fields.size("conv_L_cache", 3, limit=16)
        return replace(
            base,
            qk_norm=True,
            mixers=mixers(fields, base.num_layers),
            recurrent=RecurrentConfig(base.hidden_size, taps),
        )

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> nn.Module:
        experts = config.experts
        mlp = Lfm2Experts(config.hidden_size, experts) if experts and index >= experts.first_layer else None
        if config.mixes(index, ATTENTION):
            return DecoderLayer(config, index, mlp)
        return RecurrentLayer(config, ShortConvolution(config, index), mlp)


class Lfm2Experts(DeepseekExperts):
    eps = 1e-6


class Lfm2MoeTarget(Lfm2Target):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        fields = Fields(config)
        fields.only("use_expert_bias", True)
        count = fields.size("num_experts", 32)
        experts = ExpertsConfig(
            count=count,
            active=fields.size("num_experts_per_tok", 4, limit=count),
            intermediate_size=fields.size("moe_intermediate_size", 1792),
            normalize=fields.take("norm_topk_prob", bool, True),
            sigmoid=True,
            scale=fields.positive("routed_scaling_factor", 1.0),
            first_layer=fields.take("num_dense_layers", int, 2),
        )
        return replace(super().read_config(config | {"block_auto_adjust_ff_dim": False}), experts=experts)


def mixers(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Read `layer_types`, or `full_attn_idxs` of older files. Raises ValueError for another kind of layer."""
    indices = fields.numbers("full_attn_idxs")
    attention = range(num_layers) if indices is None else indices
    types = fields.maybe("layer_types", list) or [
        "full_attention" if layer in attention else "conv" for layer in range(num_layers)
    ]
    return typed_mixers(types, num_layers, LAYER_TYPES)


def typed_mixers(types: list[Any], num_layers: int, known: Mapping[str, str]) -> tuple[str, ...]:
    """Return the mixers of `layer_types`. Raises ValueError for another kind of layer than the `known` ones."""
    kinds = tuple(known.get(str(name), "") for name in types)
    if len(kinds) != num_layers or not all(kinds) or ATTENTION not in kinds:
        raise ValueError(
            f"config.json: layer_types={types}: must name {num_layers} layers, each {' or '.join(known)}, and "
            "attention once"
        )
    return kinds


def inner_size(fields: Fields) -> int:
    """Return the size of the MLP, which the files state before it is adjusted."""
    size = fields.size("block_ff_dim", fields.size("intermediate_size"))
    if not fields.take("block_auto_adjust_ff_dim", bool, True):
        return size
    size = int(fields.positive("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = fields.size("block_multiple_of", 256)
    return -(-size // multiple) * multiple
