"""Checkpoints of block drafters, key by key as sources.py has those of other heads.

Two layers with 8 heads and 2 KV heads of 16, an MLP of 160, fed by three layers of the target; blocks of 4 or 5 rows.
"""

from __future__ import annotations

from tests.formats.source import VD, H, Row, Source, V

DFLASH: list[Row] = [  # two layers with 8 heads and 2 KV heads of 16, fed by three layers of the target
    ("fc.weight", "fc.weight", (64, 192)),
    ("hidden_norm.weight", "hidden_norm.weight", (64,)),
    ("norm.weight", "norm.weight", (64,)),
    ("layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight", (64,)),
    ("layers.0.post_attention_layernorm.weight", "layers.0.post_attention_layernorm.weight", (64,)),
    ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight", (128, 64)),
    ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.k_proj.weight", (32, 64)),
    ("layers.0.self_attn.v_proj.weight", "layers.0.self_attn.v_proj.weight", (32, 64)),
    ("layers.0.self_attn.o_proj.weight", "layers.0.self_attn.o_proj.weight", (64, 128)),
    ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_norm.weight", (16,)),
    ("layers.0.self_attn.k_norm.weight", "layers.0.self_attn.k_norm.weight", (16,)),
    ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.gate_proj.weight", (160, 64)),
    ("layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", (160, 64)),
    ("layers.0.mlp.down_proj.weight", "layers.0.mlp.down_proj.weight", (64, 160)),
    ("layers.1.input_layernorm.weight", "layers.1.input_layernorm.weight", (64,)),
    ("layers.1.post_attention_layernorm.weight", "layers.1.post_attention_layernorm.weight", (64,)),
    ("layers.1.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight", (128, 64)),
    ("layers.1.self_attn.k_proj.weight", "layers.1.self_attn.k_proj.weight", (32, 64)),
    ("layers.1.self_attn.v_proj.weight", "layers.1.self_attn.v_proj.weight", (32, 64)),
    ("layers.1.self_attn.o_proj.weight", "layers.1.self_attn.o_proj.weight", (64, 128)),
    ("layers.1.self_attn.q_norm.weight", "layers.1.self_attn.q_norm.weight", (16,)),
    ("layers.1.self_attn.k_norm.weight", "layers.1.self_attn.k_norm.weight", (16,)),
    ("layers.1.mlp.gate_proj.weight", "layers.1.mlp.gate_proj.weight", (160, 64)),
    ("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", (160, 64)),
    ("layers.1.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight", (64, 160)),
]
DRAFT_VOCABULARY: list[Row] = [
    ("lm_head.weight", "lm_head.weight", (96, 64)),
    ("d2t", "d2t", (96,)),
    ("t2d", "t2d", (384,)),
]
MARKOV: list[Row] = [
    ("markov_head.markov_w1.weight", "markov_head.markov_w1.weight", (384, 24)),
    ("markov_head.markov_w2.weight", "markov_head.markov_w2.weight", (384, 24)),
]
MARKOV_REDUCED: list[Row] = [  # the token before is a target id, the biased one a draft id
    ("markov_head.markov_w1.weight", "markov_head.markov_w1.weight", (384, 24)),
    ("markov_head.markov_w2.weight", "markov_head.markov_w2.weight", (96, 24)),
]
GATED: list[Row] = [
    ("markov_head.gate_proj.weight", "markov_head.gate_proj.weight", (24, 88)),
    ("markov_head.gate_proj.bias", "markov_head.gate_proj.bias", (24,)),
]
RNN: list[Row] = [
    ("markov_head.joint_proj.weight", "markov_head.joint_proj.weight", (72, 112)),
    ("markov_head.joint_proj.bias", "markov_head.joint_proj.bias", (72,)),
]
CONFIDENCE: list[Row] = [
    ("confidence_head.proj.weight", "confidence_head.proj.weight", (1, 64)),
    ("confidence_head.proj.bias", "confidence_head.proj.bias", (1,)),
]
CONFIDENCE_WITH_MARKOV: list[Row] = [
    ("confidence_head.proj.weight", "confidence_head.proj.weight", (1, 88)),
    ("confidence_head.proj.bias", "confidence_head.proj.bias", (1,)),
]
DFLASH2: list[Row] = [  # groups of 16 channels: 4 per tap and side; codebooks of rank 24
    ("layers.0.attention_conv.base_kernel", "layers.0.attention_conv.base_kernel", (2, 2, 64)),
    ("layers.0.attention_conv.kernel_projection.weight", "layers.0.attention_conv.kernel_projection.weight", (16, 64)),
    ("layers.0.mlp_conv.base_kernel", "layers.0.mlp_conv.base_kernel", (2, 2, 64)),
    ("layers.0.mlp_conv.kernel_projection.weight", "layers.0.mlp_conv.kernel_projection.weight", (16, 64)),
    ("layers.1.attention_conv.base_kernel", "layers.1.attention_conv.base_kernel", (2, 2, 64)),
    ("layers.1.attention_conv.kernel_projection.weight", "layers.1.attention_conv.kernel_projection.weight", (16, 64)),
    ("layers.1.mlp_conv.base_kernel", "layers.1.mlp_conv.base_kernel", (2, 2, 64)),
    ("layers.1.mlp_conv.kernel_projection.weight", "layers.1.mlp_conv.kernel_projection.weight", (16, 64)),
    ("candidate_selector.predecessor_codebook", "candidate_selector.predecessor_codebook", (384, 24)),
    ("candidate_selector.successor_codebook", "candidate_selector.successor_codebook", (384, 24)),
    ("candidate_selector.hidden_projection.weight", "candidate_selector.hidden_projection.weight", (24, 64)),
]
COPIES = {"embed_tokens.weight": (384, 64), "lm_head.weight": (384, 64)}  # of the target's tensors

FULL, SLIDING = "full_attention", "sliding_attention"
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "float32",
    "eos_token_id": 0,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": 160,
    "layer_types": [FULL, FULL],
    "max_position_embeddings": 40960,
    "max_window_layers": 2,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": V,
}
DFLASH_CONFIG = {  # the first published files
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 5,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 5]},
    "num_target_layers": 8,
}
DFLASH2_CONFIG = {
    **{key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling")},
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        "block_size": 5,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 7,
        "selector_rank": 24,
        "selector_top_k": 16,
        "target_layer_ids": [1, 3, 5],
    },
    "layer_types": [SLIDING, SLIDING],
    "num_target_layers": 8,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 9,
    "use_sliding_window": True,
}
DEEPSPEC_CONFIG = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 24,
    "mask_token_id": 7,
    "num_anchors": 512,
    "num_target_layers": 8,
    "target_layer_ids": [1, 3, 5],
}
SPECFORGE_CONFIG = {
    **QWEN3,
    "architectures": ["DSparkDraftModel"],
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 4,
    "dflash_config": {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 24,
        "mask_token_id": 7,
        "projector_type": "dspark",
        "target_layer_ids": [1, 3, 5],
    },
    "num_target_layers": 8,
}
LIQUID_CONFIG = {
    **QWEN3,
    "architectures": ["Lfm2DSparkDraftModel"],
    "block_size": 4,
    "confidence_head_with_markov": True,
    "dflash_config": {"mask_token_id": 7, "num_target_layers": 8, "target_layer_ids": [1, 3, 5]},
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 24,
    "rope_is_neox_style": False,
}
SPECULATORS_DFLASH_CONFIG = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.8.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {**QWEN3, "architectures": ["Qwen3ForCausalLM"]},
    "draft_vocab_size": VD,
    "block_size": 5,
    "target_hidden_size": None,
    "aux_hidden_state_layer_ids": [2, 4, 6],
    "mask_token_id": 7,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
    "tie_word_embeddings": False,
}
SPECULATORS_DSPARK_CONFIG = {
    **SPECULATORS_DFLASH_CONFIG,
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "speculators_config": {**SPECULATORS_DFLASH_CONFIG["speculators_config"], "algorithm": "dspark"},
    "block_size": 4,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 24,
    "sample_from_anchor": True,
}
WINDOWED = {"layer_types": [SLIDING, SLIDING], "sliding_window": 9, "use_sliding_window": True}


BLOCK_SOURCES = {
    "dflash": Source("dflash", "dflash", DFLASH_CONFIG, DFLASH),
    "dflash with windows": Source(
        "dflash",
        "dflash",
        {
            **{key: value for key, value in DFLASH_CONFIG.items() if key != "block_size"},
            "dflash_config": {"block_size": 5, "mask_token_id": 7, "target_layer_ids": [1, 3, 5]},
            "layer_types": [SLIDING, FULL],
            "sliding_window": 9,
            "use_sliding_window": True,
        },
        DFLASH,
    ),
    "dflash not causal": Source("dflash", "dflash", {**DFLASH_CONFIG, **WINDOWED, "is_causal": False}, DFLASH),
    "dflash of JetSpec": Source(
        "dflash",
        "dflash",
        {
            **DFLASH_CONFIG,
            "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3, 5], "causal_head": True},
        },
        DFLASH,
    ),
    "deepspec": Source("deepspec", "dspark", DEEPSPEC_CONFIG, DFLASH + MARKOV + CONFIDENCE_WITH_MARKOV, copies=COPIES),
    "deepspec gated": Source(
        "deepspec",
        "dspark",
        {**DEEPSPEC_CONFIG, "markov_head_type": "gated", "confidence_head_with_markov": False},
        DFLASH + MARKOV + GATED + CONFIDENCE,
        copies=COPIES,
    ),
    "deepspec rnn": Source(
        "deepspec",
        "dspark",
        {
            **{key: value for key, value in DEEPSPEC_CONFIG.items() if key != "confidence_head_with_markov"},
            "markov_head_type": "rnn",
            "enable_confidence_head": False,
        },
        DFLASH + MARKOV + RNN,
        copies=COPIES,
    ),
    "deepspec dflash": Source(
        "deepspec",
        "dflash",
        {
            **{
                key: value
                for key, value in DEEPSPEC_CONFIG.items()
                if key not in ("confidence_head_with_markov", "markov_head_type")
            },
            "markov_rank": 0,
            "enable_confidence_head": False,
        },
        DFLASH,
        copies=COPIES,
    ),
    "specforge-dspark": Source(
        "specforge-dspark", "dspark", SPECFORGE_CONFIG, DFLASH + MARKOV + CONFIDENCE_WITH_MARKOV
    ),
    "liquid-dspark": Source("liquid-dspark", "dspark", LIQUID_CONFIG, DFLASH + MARKOV + CONFIDENCE_WITH_MARKOV),
    "speculators dflash": Source(
        "speculators",
        "dflash",
        SPECULATORS_DFLASH_CONFIG,
        DFLASH + DRAFT_VOCABULARY,
        copies={"embed_tokens.weight": (384, 64)},
    ),
    "speculators dflash with windows": Source(
        "speculators",
        "dflash",
        {
            **SPECULATORS_DFLASH_CONFIG,
            "draft_vocab_size": V,
            "sliding_window_non_causal": True,
            "transformer_layer_config": {**QWEN3, **WINDOWED, "layer_types": [FULL, SLIDING]},
        },
        DFLASH,
        copies=COPIES,
    ),
    "speculators dspark": Source(
        "speculators",
        "dspark",
        SPECULATORS_DSPARK_CONFIG,
        DFLASH + DRAFT_VOCABULARY + MARKOV_REDUCED + CONFIDENCE_WITH_MARKOV,
        copies={"embed_tokens.weight": (384, 64)},
    ),
    "speculators dspark in place": Source(
        "speculators",
        "dspark",
        {
            **SPECULATORS_DSPARK_CONFIG,
            "draft_vocab_size": V,
            "block_size": 5,
            "sample_from_anchor": False,
            "enable_confidence_head": False,
        },
        DFLASH + MARKOV,
        copies=COPIES,
    ),
    "dflash2": Source("dflash2", "dflash2", DFLASH2_CONFIG, DFLASH + DFLASH2),
    "speculators dflash2": Source(
        "speculators",
        "dflash2",
        {
            **SPECULATORS_DFLASH_CONFIG,
            "architectures": ["DFlash2DraftModel"],
            "speculators_model_type": "dflash2",
            "speculators_config": {**SPECULATORS_DFLASH_CONFIG["speculators_config"], "algorithm": "dflash2"},
            "transformer_layer_config": {**QWEN3, **WINDOWED},
            "draft_vocab_size": V,
            "sliding_window_non_causal": True,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 24,
            "selector_top_k": 16,
        },
        DFLASH + DFLASH2,
        copies=COPIES,
    ),
}
