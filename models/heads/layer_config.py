"""Parts of heads' configs: a decoder layer with sizes taken from the target, its config.json, the draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from models.config import RopeConfig, TargetConfig
from models.heads.config import Facts

Shape = TypeVar("Shape")
SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")

# what the config.json of a target states of layers that Llama's keys do not describe
FAMILY_KEYS = (
    *("architectures", "model_type", "num_hidden_layers", "norm_topk_prob", "num_experts", "num_experts_per_tok"),
    *("num_local_experts", "moe_intermediate_size", "swiglu_alpha", "swiglu_limit", "first_k_dense_replace"),
    *("moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts", "routed_scaling_factor", "scoring_func"),
    *("topk_group", "topk_method", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("rope_interleave", "v_head_dim", "shared_expert_intermediate_size", "partial_rotary_factor"),
    *("layer_types", "full_attention_interval"),
)
PARTIAL = "partial_rotary_factor"
FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"


def head_layer(
    target: TargetConfig, *, qk_norm: bool = False, window: int | None = None, **sizes: int | None
) -> TargetConfig:
    """Return the config of Llama's layers for a target of any family, with its rotary embedding and the given SIZES.

    With `qk_norm` they are Qwen3's; `window`: of all of them. Of longrope, whose divisors are those of the target's
    head size, only the base is taken.
    """
    assert sizes.keys() <= set(SIZES)
    stated = {key: size for key, size in sizes.items() if size is not None}
    merged: dict[str, Any] = {key: getattr(target, key) for key in SIZES} | stated
    layer = TargetConfig(  # all other options have Llama's defaults, whatever the target's family sets
        architecture=QWEN3 if qk_norm else LLAMA,
        qk_norm=qk_norm,
        windows=() if window is None else (window,) * merged["num_layers"],
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=False,
        attention_bias=target.output_bias,  # Llama has it on both projections or on none
        output_bias=target.output_bias,
        mlp_bias=target.mlp_bias,
        rope=RopeConfig(target.rope.theta) if target.rope.divisors else target.rope,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
        **merged,
    )
    if layer.num_heads % layer.num_kv_heads:
        raise ValueError(
            f"head.num_heads={layer.num_heads}: must be a multiple of head.num_kv_heads={layer.num_kv_heads}"
        )
    return layer


def has_own_layers(target: TargetConfig) -> bool:
    """Return whether further layers of a target are of its own kind, with experts or an output gate, not Llama's."""
    return target.output_gate or (target.experts is not None and target.recurrent is None)


def further_layer(target: TargetConfig, count: int) -> TargetConfig:
    """Return the config of `count` layers with attention after the target's last; heads see all, without sinks."""
    experts = target.experts
    if experts is not None:
        experts = replace(experts, first_layer=max(0, experts.first_layer - target.num_layers))
    plain: dict[str, Any] = {"windows": (), "sinks": False, "tie_word_embeddings": False, "mtp_modules": 0}
    return replace(target, num_layers=count, experts=experts, mixers=(), recurrent=None, **plain)


def family_json(layer: TargetConfig) -> dict[str, Any]:
    """Return a further layer of a target under the keys of its family, whose num_hidden_layers are the target's."""
    stated = {key: layer.stated[key] for key in FAMILY_KEYS if key in layer.stated}
    part = {} if layer.rotary_dim is None or layer.latent else {PARTIAL: layer.rotary_dim / layer.head_dim}
    return layer_json(layer) | stated | part | {"rope_parameters": layer.rope.to_json()}


def check_layer_ids(ids: Sequence[int] | None, target: TargetConfig | None = None) -> None:
    """Raise ValueError unless head.aux_layers is null or names distinct layers, of `target` if given."""
    if ids is None:
        return
    if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
        raise ValueError(f"head.aux_layers={list(ids)}: must be distinct layer ids from 0, or null")
    if target is not None and max(ids) > target.num_layers:
        raise ValueError(f"head.aux_layers={list(ids)}: ids of this target are 0..{target.num_layers}")


def spread_layers(count: int, num_layers: int) -> tuple[int, ...]:
    """Return `count` layers of a target of `num_layers`, evenly spread, as HF hidden_states indices.

    The published heads read the outputs of layers between 1 and L - 3, and a head of one layer that of L // 2. The
    output of layer i is hidden state i + 1. Raises ValueError where they collide.
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    outputs = [round(1 + index * (num_layers - 4) / (count - 1)) for index in range(count)]
    if len(set(outputs)) < count or num_layers < 4:
        raise ValueError(f"head.aux_layers: {count} layers collide on a target of {num_layers}; name them")
    return tuple(output + 1 for output in outputs)


def draft_vocabulary(size: int | None, target: TargetConfig) -> int:
    """Return the size of the draft vocabulary for `head.draft_vocab_size`; None or too large means all tokens."""
    return min(size or target.vocab_size, target.vocab_size)


def check_draft_vocabulary(size: int, vocab_size: int) -> None:
    if not 1 <= size <= vocab_size:
        raise ValueError(f"head.draft_vocab_size={size}: must be 1 to the target's {vocab_size}")


def check_mask_token(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise ValueError(f"head.mask_token_id={token}: must be a token of the target's {vocab_size}")


def layer_json(layer: TargetConfig) -> dict[str, Any]:
    """Return the layer under the keys of Hugging Face's LlamaConfig, and `qkv_bias`, which vLLM reads too."""
    scaling = {key: value for key, value in layer.rope.to_json().items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "architectures": [LLAMA],
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": layer.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_position_embeddings,
        "rope_theta": layer.rope.theta,
        "rope_scaling": None if layer.rope.rope_type == "default" else scaling,
        "attention_bias": layer.output_bias,
        **({"qkv_bias": True} if layer.attention_bias and not layer.output_bias else {}),
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": False,
        "bos_token_id": layer.bos_token_id,
        "eos_token_id": list(layer.eos_token_ids) or None,
    }


def windowed_json(layer: TargetConfig) -> dict[str, Any]:
    """Return the layer under the keys of Hugging Face's Qwen3Config, or of LlamaConfig if queries are not normed.

    Windows have the keys of the former in both.
    """
    window = next((window for window in layer.windows if window is not None), None)
    kinds = [FULL if layer.window(index) is None else SLIDING for index in range(layer.num_layers)]
    windows = {"layer_types": kinds, "sliding_window": window, "use_sliding_window": window is not None}
    family = {"model_type": "qwen3", "architectures": [QWEN3]} if layer.qk_norm else {}
    return layer_json(layer) | family | (windows if layer.qk_norm or window else {})


def speculators_json(shape: Any, layer: dict[str, Any], facts: Facts, **proposal: Any) -> dict[str, Any]:
    """Return the keys that all heads have in the speculators format, which vLLM reads."""
    tokens = {"proposal_type": "greedy", "speculative_tokens": facts.speculative_tokens}
    return {
        "architectures": [shape.speculator],
        "speculators_model_type": shape.algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": shape.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [tokens | proposal],
            "verifier": facts.verifier_json,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.draft_vocab_size,
    }


def reaching(config: Shape, positions: int) -> Shape:
    """Extend the context to at least `positions`: other exporters state a short one, and no weight depends on it."""
    layer: TargetConfig | None = getattr(config, "layer", None)
    if layer is None or layer.max_position_embeddings >= positions:
        return config
    rope, numbers = layer.rope, dict(layer.rope.parameters)
    if rope.rope_type == "yarn":  # the one scaling that defaults to max_position_embeddings
        numbers.setdefault("original_max_position_embeddings", layer.max_position_embeddings)
    rope = replace(rope, parameters=tuple(sorted(numbers.items())))
    return replace(cast(Any, config), layer=replace(layer, max_position_embeddings=positions, rope=rope))
