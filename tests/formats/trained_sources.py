"""Heads as speculators 0.9.0 saves them where nothing is set: every layer has a window.

An EAGLE-3 head has Llama's layers and feeds back normed states, a P-EAGLE head has Qwen3's layers.

Keys and names are those of files that its own classes wrote (`python -m tests.trainers`), at the sizes of sources.py;
the windows are shorter than the texts of the tests.
"""

from __future__ import annotations

from typing import Any

from tests.formats.source import VD, H, Row, Source, V

SLIDING, FULL = "sliding_attention", "full_attention"
BODY: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (V, H),
    "layers.0.self_attn.q_proj.weight": (64, 2 * H),
    "layers.0.self_attn.k_proj.weight": (16, 2 * H),
    "layers.0.self_attn.v_proj.weight": (16, 2 * H),
    "layers.0.self_attn.o_proj.weight": (H, 64),
    "layers.0.mlp.gate_proj.weight": (160, H),
    "layers.0.mlp.up_proj.weight": (160, H),
    "layers.0.mlp.down_proj.weight": (H, 160),
    "layers.0.hidden_norm.weight": (H,),
    "layers.0.input_layernorm.weight": (H,),
    "layers.0.post_attention_layernorm.weight": (H,),
    "fc.weight": (H, 3 * H),
    "norm.weight": (H,),
    "lm_head.weight": (VD, H),
    "d2t": (VD,),
    "t2d": (V,),
}
INPUT_NORM = {"input_norm.weight": (3 * H,)}
HEAD_NORMS = {"layers.0.self_attn.q_norm.weight": (8,), "layers.0.self_attn.k_norm.weight": (8,)}
SECOND = {
    name.replace("layers.0.", "layers.1."): shape[:1] + tuple(min(size, H) for size in shape[1:])
    for name, shape in (BODY | HEAD_NORMS).items()
    if name.startswith("layers.0.") and "hidden_norm" not in name and "down_proj" not in name
} | {"layers.1.mlp.down_proj.weight": (H, 160)}
MASK_HIDDEN = {"mask_hidden": (1, 1, 3 * H)}


def layer(**keys: Any) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "layer_types": [SLIDING],
        "max_position_embeddings": 256,
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 9,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": V,
    } | keys


LLAMA = layer(model_type="llama", bos_token_id=1, eos_token_id=2, mlp_bias=False, pretraining_tp=1)
QWEN3 = layer(model_type="qwen3", max_window_layers=28)


def config(kind: str, model: str, layers: dict[str, Any], tokens: int, **keys: Any) -> dict[str, Any]:
    method = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}
    return {
        "architectures": [f"{model}DraftModel"],
        "auto_map": {"": f"config.{model}SpeculatorConfig"},
        "draft_vocab_size": VD,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": kind == "peagle",
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "norm_output": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "/a/folder/of/their/machine"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "transformers_version": "5.19.0",
    } | keys


def source(head: str, keys: dict[str, Any], *parts: dict[str, tuple[int, ...]]) -> Source:
    rows: list[Row] = [(name, name, shape) for part in parts for name, shape in part.items()]
    return Source("speculators", head, keys, rows)


TWO_LAYERS = QWEN3 | {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
EAGLE3 = config("eagle3", "Eagle3", LLAMA, 3, norm_before_fc=True, norm_output=True)
TRAINED_SOURCES: dict[str, Source] = {
    "speculators 0.9.0": source("eagle3", EAGLE3, BODY, INPUT_NORM),
    "speculators 0.9.0 qwen3, two layers": source(
        "eagle3", config("eagle3", "Eagle3", TWO_LAYERS, 3), BODY, HEAD_NORMS, SECOND
    ),
    "speculators 0.9.0 final state": source(
        "eagle3",
        config("eagle3", "Eagle3", LLAMA, 3, eagle_aux_hidden_state_layer_ids=[2, 5, 8]),
        BODY,
    ),
    "speculators 0.9.0 p-eagle": source(
        "p-eagle", config("peagle", "PEagle", QWEN3, 8, mask_token_id=7), BODY, HEAD_NORMS, MASK_HIDDEN
    ),
    "speculators 0.9.0 p-eagle llama": source(
        "p-eagle", config("peagle", "PEagle", LLAMA, 8, mask_token_id=7), BODY, MASK_HIDDEN
    ),
}
