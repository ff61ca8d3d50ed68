"""Every key of the config.json of block drafters that test_golden.py writes."""

from __future__ import annotations

VERIFIER = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": [0],
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
}
WINDOWED = {
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": 9,
    "use_sliding_window": True,
}
DFLASH = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "is_causal": False,
    "draft_vocab_size": 384,
    "dflash_config": {
        "block_size": 5,
        "mask_token_id": 7,
        "target_layer_ids": [1, 3, 5],
        "sample_from_anchor": False,
    },
    "torch_dtype": "float32",
}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 24, "selector_top_k": 16}
DFLASH2 = {
    **DFLASH,
    **WINDOWED,
    "architectures": ["DFlash2DraftModel"],
    "rope_theta": 10000000.0,
    "dflash_config": {**DFLASH["dflash_config"], **SELECTOR},
}
MARKOV = {
    "markov_rank": 24,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DEEPSPEC = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "mask_token_id": 7,
    "target_layer_ids": [1, 3, 5],
    **MARKOV,
    "torch_dtype": "float32",
}
BLOCK_PROPOSAL = {
    "algorithm": "dflash",
    "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
    "verifier": VERIFIER,
}
SPECULATORS_DFLASH = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "speculators_config": BLOCK_PROPOSAL,
    "transformer_layer_config": QWEN3,
    "draft_vocab_size": 384,
    "target_hidden_size": 64,
    "block_size": 5,
    "mask_token_id": 7,
    "aux_hidden_state_layer_ids": [2, 4, 6],
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
    "torch_dtype": "float32",
}
# (source, format written) -> every key of config.json
BLOCK_CONFIGS = {
    ("dflash", "dflash"): DFLASH,
    ("dflash with windows", "dflash"): {
        **{key: value for key, value in DFLASH.items() if key != "is_causal"},  # layers with a window are, others not
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        "use_sliding_window": True,
    },
    ("dflash of JetSpec", "dflash"): {**DFLASH, "is_causal": True},
    ("dflash", "speculators"): SPECULATORS_DFLASH,
    ("dflash not causal", "headway"): {
        **SPECULATORS_DFLASH,
        "transformer_layer_config": {**QWEN3, **WINDOWED},
        "sliding_window_non_causal": True,
    },
    ("dflash of JetSpec", "headway"): {**SPECULATORS_DFLASH, "causal_head": True},
    ("deepspec dflash", "deepspec"): {
        **{key: value for key, value in DEEPSPEC.items() if not key.startswith(("markov", "confidence"))},
        "markov_rank": 0,
        "enable_confidence_head": False,
    },
    ("deepspec", "deepspec"): DEEPSPEC,
    ("deepspec", "headway"): {
        **SPECULATORS_DFLASH,
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_config": {**BLOCK_PROPOSAL, "algorithm": "dspark"},
        "block_size": 4,
        "sample_from_anchor": True,
        **MARKOV,
    },
    ("specforge-dspark", "specforge-dspark"): {
        **DFLASH,
        "architectures": ["DSparkDraftModel"],
        "dflash_config": {
            **DFLASH["dflash_config"],
            "block_size": 4,
            "sample_from_anchor": True,
            "projector_type": "dspark",
            "attention_mode": "gqa",
            **MARKOV,
        },
    },
    ("liquid-dspark", "liquid-dspark"): {
        **DFLASH,
        "architectures": ["Lfm2DSparkDraftModel"],
        "block_size": 4,
        "dflash_config": {"mask_token_id": 7, "sample_from_anchor": True, "target_layer_ids": [1, 3, 5]},
        "rope_is_neox_style": False,
        **MARKOV,
    },
    ("dflash2", "dflash2"): DFLASH2,
    ("dflash2", "headway"): {**DFLASH2, "verifier": VERIFIER, "speculative_tokens": 4},
    ("dflash2", "speculators"): {
        **SPECULATORS_DFLASH,
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "speculators_config": {**BLOCK_PROPOSAL, "algorithm": "dflash2"},
        "transformer_layer_config": {**QWEN3, **WINDOWED, "rope_theta": 10000000.0},
        "sliding_window_non_causal": True,
        **SELECTOR,
    },
}
