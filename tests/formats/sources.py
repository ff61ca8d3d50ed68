"""A checkpoint of each format, key by key as its documentation lists them, with our names for its tensors.

Sizes: V = 384 tokens, H = 64, 8 attention heads and 2 KV heads of 8, MLP of 160, draft vocabulary of 96; a target of
8 layers. The lists are written out, so that no code of ours decides what is in a file.
"""

from __future__ import annotations

from tests.formats.block_sources import BLOCK_SOURCES
from tests.formats.source import VD, H, Row, Source, V
from tests.formats.trained_sources import TRAINED_SOURCES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 16,  # the published heads say 2048, whatever the target has
    "rms_norm_eps": 1e-05,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
    # what transformers adds and no forward depends on
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "transformers_version": "4.28.1",
    "use_cache": True,
}

EAGLE: list[Row] = [
    ("embed_tokens.weight", "embed_tokens.weight", (384, 64)),
    ("fc.weight", "fc.weight", (64, 128)),
    ("fc.bias", "fc.bias", (64,)),
    ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight", (64, 64)),
    ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.k_proj.weight", (16, 64)),
    ("layers.0.self_attn.v_proj.weight", "layers.0.self_attn.v_proj.weight", (16, 64)),
    ("layers.0.self_attn.o_proj.weight", "layers.0.self_attn.o_proj.weight", (64, 64)),
    ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.gate_proj.weight", (160, 64)),
    ("layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", (160, 64)),
    ("layers.0.mlp.down_proj.weight", "layers.0.mlp.down_proj.weight", (64, 160)),
    ("layers.0.post_attention_layernorm.weight", "layers.0.post_attention_layernorm.weight", (64,)),
]

QKV_BIASES: list[Row] = [
    ("layers.0.self_attn.q_proj.bias", "layers.0.self_attn.q_proj.bias", (64,)),
    ("layers.0.self_attn.k_proj.bias", "layers.0.self_attn.k_proj.bias", (16,)),
    ("layers.0.self_attn.v_proj.bias", "layers.0.self_attn.v_proj.bias", (16,)),
]

MIDLAYER: list[Row] = [
    ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight", (64, 128)),
    ("midlayer.self_attn.k_proj.weight", "layers.0.self_attn.k_proj.weight", (16, 128)),
    ("midlayer.self_attn.v_proj.weight", "layers.0.self_attn.v_proj.weight", (16, 128)),
    ("midlayer.self_attn.o_proj.weight", "layers.0.self_attn.o_proj.weight", (64, 64)),
    ("midlayer.mlp.gate_proj.weight", "layers.0.mlp.gate_proj.weight", (160, 64)),
    ("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", (160, 64)),
    ("midlayer.mlp.down_proj.weight", "layers.0.mlp.down_proj.weight", (64, 160)),
    ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", (64,)),
    ("midlayer.input_layernorm.weight", "layers.0.input_layernorm.weight", (64,)),
    ("midlayer.post_attention_layernorm.weight", "layers.0.post_attention_layernorm.weight", (64,)),
    ("fc.weight", "fc.weight", (64, 192)),
    ("norm.weight", "norm.weight", (64,)),
    ("lm_head.weight", "lm_head.weight", (96, 64)),
    ("d2t", "d2t", (96,)),
    ("t2d", "t2d", (384,)),
]
EMBEDDING: list[Row] = [("embed_tokens.weight", "embed_tokens.weight", (384, 64))]

SPECULATORS: list[Row] = [
    *EMBEDDING,
    ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight", (64, 128)),
    ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.k_proj.weight", (16, 128)),
    ("layers.0.self_attn.v_proj.weight", "layers.0.self_attn.v_proj.weight", (16, 128)),
    ("layers.0.self_attn.o_proj.weight", "layers.0.self_attn.o_proj.weight", (64, 64)),
    ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.gate_proj.weight", (160, 64)),
    ("layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", (160, 64)),
    ("layers.0.mlp.down_proj.weight", "layers.0.mlp.down_proj.weight", (64, 160)),
    ("layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight", (64,)),
    ("layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight", (64,)),
    ("layers.0.post_attention_layernorm.weight", "layers.0.post_attention_layernorm.weight", (64,)),
    ("fc.weight", "fc.weight", (64, 192)),
    ("norm.weight", "norm.weight", (64,)),
    ("lm_head.weight", "lm_head.weight", (96, 64)),
    ("d2t", "d2t", (96,)),
    ("t2d", "t2d", (384,)),
]
SECOND_LAYER: list[Row] = [
    ("layers.1.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight", (64, 64)),
    ("layers.1.self_attn.k_proj.weight", "layers.1.self_attn.k_proj.weight", (16, 64)),
    ("layers.1.self_attn.v_proj.weight", "layers.1.self_attn.v_proj.weight", (16, 64)),
    ("layers.1.self_attn.o_proj.weight", "layers.1.self_attn.o_proj.weight", (64, 64)),
    ("layers.1.mlp.gate_proj.weight", "layers.1.mlp.gate_proj.weight", (160, 64)),
    ("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", (160, 64)),
    ("layers.1.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight", (64, 160)),
    ("layers.1.input_layernorm.weight", "layers.1.input_layernorm.weight", (64,)),
    ("layers.1.post_attention_layernorm.weight", "layers.1.post_attention_layernorm.weight", (64,)),
]
FC_NORM: list[Row] = [
    ("fc_norm.0.weight", "fc_norm.0.weight", (64,)),
    ("fc_norm.1.weight", "fc_norm.1.weight", (64,)),
    ("fc_norm.2.weight", "fc_norm.2.weight", (64,)),
]
INPUT_NORM: list[Row] = [("input_norm.weight", "input_norm.weight", (192,))]
MASK_HIDDEN: list[Row] = [("mask_hidden", "mask_hidden", (1, 1, 192))]

MTP: list[Row] = [
    (f"mtp_layers.0.{name}.weight", f"mtp_layers.0.{name}.weight", shape)
    for name, shape in {
        "input_proj": (64, 128),
        "hidden_layernorm": (64,),
        "token_layernorm": (64,),
        "input_layernorm": (64,),
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (16, 64),
        "self_attn.v_proj": (16, 64),
        "self_attn.o_proj": (64, 64),
        "post_attention_layernorm": (64,),
        "mlp.gate_proj": (160, 64),
        "mlp.up_proj": (160, 64),
        "mlp.down_proj": (64, 160),
        "final_layernorm": (64,),
    }.items()
]
MTP_NORMS: list[Row] = [
    ("mtp_layers.0.self_attn.q_norm.weight", "mtp_layers.0.self_attn.q_norm.weight", (8,)),
    ("mtp_layers.0.self_attn.k_norm.weight", "mtp_layers.0.self_attn.k_norm.weight", (8,)),
]
MTP_SECOND: list[Row] = [
    (name.replace(".0.", ".1."), our_name.replace(".0.", ".1."), shape) for name, our_name, shape in MTP
]

MEDUSA: list[Row] = [
    ("0.0.linear.weight", "blocks.0.layers.0.weight", (64, 64)),
    ("0.0.linear.bias", "blocks.0.layers.0.bias", (64,)),
    ("0.1.linear.weight", "blocks.0.layers.1.weight", (64, 64)),
    ("0.1.linear.bias", "blocks.0.layers.1.bias", (64,)),
    ("0.2.weight", "lm_heads.0.weight", (384, 64)),
    ("1.0.linear.weight", "blocks.1.layers.0.weight", (64, 64)),
    ("1.0.linear.bias", "blocks.1.layers.0.bias", (64,)),
    ("1.1.linear.weight", "blocks.1.layers.1.weight", (64, 64)),
    ("1.1.linear.bias", "blocks.1.layers.1.bias", (64,)),
    ("1.2.weight", "lm_heads.1.weight", (384, 64)),
    ("2.0.linear.weight", "blocks.2.layers.0.weight", (64, 64)),
    ("2.0.linear.bias", "blocks.2.layers.0.bias", (64,)),
    ("2.1.linear.weight", "blocks.2.layers.1.weight", (64, 64)),
    ("2.1.linear.bias", "blocks.2.layers.1.bias", (64,)),
    ("2.2.weight", "lm_heads.2.weight", (384, 64)),
]
VLLM_MEDUSA: list[Row] = [(our_name, our_name, shape) for _, our_name, shape in MEDUSA]
VLLM_MEDUSA_SMALL: list[Row] = [  # no biases, one shared LM head over part of the vocabulary
    ("blocks.0.layers.0.weight", "blocks.0.layers.0.weight", (64, 64)),
    ("blocks.1.layers.0.weight", "blocks.1.layers.0.weight", (64, 64)),
    ("lm_head.weight", "lm_head.weight", (96, 64)),
    ("token_map", "token_map", (96,)),
]

MLP: list[Row] = [
    ("speculator.emb.0.weight", "emb.0.weight", (384, 40)),
    ("speculator.emb.1.weight", "emb.1.weight", (384, 40)),
    ("speculator.emb.2.weight", "emb.2.weight", (384, 40)),
    ("speculator.proj.0.weight", "proj.0.weight", (40, 64)),
    ("speculator.proj.1.weight", "proj.1.weight", (40, 40)),
    ("speculator.proj.2.weight", "proj.2.weight", (40, 40)),
    ("speculator.head.0.weight", "head.0.weight", (384, 40)),
    ("speculator.head.1.weight", "head.1.weight", (384, 40)),
    ("speculator.head.2.weight", "head.2.weight", (384, 40)),
    ("speculator.ln.0.weight", "ln.0.weight", (40,)),
    ("speculator.ln.0.bias", "ln.0.bias", (40,)),
    ("speculator.ln.1.weight", "ln.1.weight", (40,)),
    ("speculator.ln.1.bias", "ln.1.bias", (40,)),
    ("speculator.ln.2.weight", "ln.2.weight", (40,)),
    ("speculator.ln.2.bias", "ln.2.bias", (40,)),
]
MLP_TIED: list[Row] = [
    ("speculator.emb.0.weight", "emb.0.weight", (384, 64)),
    ("speculator.proj.0.weight", "proj.0.weight", (64, 64)),
    ("speculator.proj.1.weight", "proj.1.weight", (64, 64)),
    ("speculator.head.0.weight", "head.0.weight", (384, 64)),
    ("speculator.ln.0.weight", "ln.0.weight", (64,)),
    ("speculator.ln.0.bias", "ln.0.bias", (64,)),
]

# the first and second projection of every gate; D = 40
LSTM: list[Row] = [
    ("forget_emb.0.weight", "forget_emb.0.weight", (384, 40)),
    ("forget_proj.0.weight", "forget_proj.0.weight", (40, 64)),
    ("forget_proj.1.weight", "forget_proj.1.weight", (40, 40)),
    ("input_proj.0.weight", "input_proj.0.weight", (40, 64)),
    ("input_proj.1.weight", "input_proj.1.weight", (40, 40)),
    ("cell_proj.0.weight", "cell_proj.0.weight", (40, 64)),
    ("cell_proj.1.weight", "cell_proj.1.weight", (40, 40)),
    ("output_proj.0.weight", "output_proj.0.weight", (40, 64)),
    ("output_proj.1.weight", "output_proj.1.weight", (40, 40)),
    ("cell_ln.0.weight", "cell_ln.0.weight", (40,)),
    ("cell_ln.0.bias", "cell_ln.0.bias", (40,)),
    ("state_ln.0.weight", "state_ln.0.weight", (40,)),
    ("state_ln.0.bias", "state_ln.0.bias", (40,)),
    ("head.0.weight", "head.0.weight", (384, 40)),
]
LSTM_EMBEDDINGS: list[Row] = [
    ("input_emb.0.weight", "input_emb.0.weight", (384, 40)),
    ("cell_emb.0.weight", "cell_emb.0.weight", (384, 40)),
    ("output_emb.0.weight", "output_emb.0.weight", (384, 40)),
]
# modules of a Sequential: an embedding or projection, a norm, GELU, a linear layer; after the sum a norm, GELU, a
# linear layer, a norm
STACKS: list[Row] = [
    (name, name, (40, 64) if name == "proj.0.0.weight" else shape)
    for part, layers in (
        ("emb", {"0.weight": (384, 40), "1.weight": (40,), "1.bias": (40,), "3.weight": (40, 40)}),
        ("proj", {"0.weight": (40, 48), "1.weight": (40,), "1.bias": (40,), "3.weight": (40, 40)}),
        ("ln", {"0.weight": (40,), "0.bias": (40,), "2.weight": (48, 40), "3.weight": (48,), "3.bias": (48,)}),
        ("head", {"weight": (384, 48)}),
    )
    for depth in range(3)
    for name, shape in ((f"{part}.{depth}.{layer}", shape) for layer, shape in layers.items())
]

SPECULATORS_CONFIG = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.4.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {**LLAMA, "rope_theta": 500000.0, "rope_scaling": None, "head_dim": 8},
    "draft_vocab_size": VD,
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "target_hidden_size": None,
    "embed_requires_grad": False,
}
MTP_CONFIG = {
    "architectures": ["MTPDraftModel"],
    "speculators_model_type": "mtp",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "mtp",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
    },
    "num_nextn_predict_layers": 1,
    "transformer_layer_config": {  # the whole target's
        **LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 8,
        "head_dim": 8,
        "rope_theta": 1000000.0,
        "layer_types": ["full_attention"] * 8,
        "max_window_layers": 8,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
}
MLP_CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "vocab_size": V,
    "emb_dim": H,
    "inner_dim": 40,
    "n_predict": 3,
    "top_k_tokens_per_head": [5, 4, 3],
    "n_candidates": 5,
    "tie_weights": False,
    "scale_input": True,
}
LSTM_CONFIG = {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "base_model_name_or_path": "some/target",
    "input_hidden_dim": H,
    "inner_dim": "40",
    "proj_dim": "40",
    "emb_dim": "40",
    "model_type": "mlp_speculator",
    "n_candidates": 3,
    "n_predict": 3,
    "scale_input": True,
    "tie_weights": True,
    "tie_lstm_embs": True,
    "top_k_tokens_per_head": [1, 1, 1],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3",
    "vocab_size": V,
    "method": "sum_lstm",
}
VLLM_MEDUSA_CONFIG = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": H,
    "vocab_size": V,
    "num_heads": 3,
    "num_hidden_layers": 2,
    "max_paths": 64,
    "topk": 10,
    "truncated_vocab_size": None,
    "medusa_fc_bias": True,
}


EAGLE3_CONFIG = {**LLAMA, "draft_vocab_size": VD}
SOURCES = {
    "safeailab-eagle": Source("safeailab-eagle", "eagle", LLAMA, EAGLE),
    "safeailab-eagle without bias": Source(
        "safeailab-eagle",
        "eagle",
        {**LLAMA, "bias": False, "rope_theta": 500000.0},
        [row for row in EAGLE if row[0] != "fc.bias"],
    ),
    "safeailab-eagle of Qwen2": Source(
        "safeailab-eagle",
        "eagle",
        {
            **LLAMA,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "attention_dropout": 0.0,
            "max_window_layers": 28,
            "qkv_bias": True,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "use_sliding_window": False,
        },
        EAGLE + QKV_BIASES,
    ),
    "safeailab-eagle3": Source("safeailab-eagle3", "eagle3", EAGLE3_CONFIG, MIDLAYER + EMBEDDING),
    "safeailab-eagle3 sharing the embedding": Source("safeailab-eagle3", "eagle3", EAGLE3_CONFIG, MIDLAYER),
    "safeailab-eagle3 of SpecForge": Source(
        "safeailab-eagle3",
        "eagle3",
        {
            **EAGLE3_CONFIG,
            "architectures": ["LlamaForCausalLMEagle3"],
            "head_dim": 8,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": 48,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "fc_norm": True,
            "norm_output": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        },
        MIDLAYER + EMBEDDING + FC_NORM,
        options=["--layer-ids", "outputs", "--norm-output", "vllm"],
    ),
    "safeailab-eagle3 of ModelOpt": Source(
        "safeailab-eagle3",
        "eagle3",
        {
            **EAGLE3_CONFIG,
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": None,
            },
        },
        MIDLAYER + EMBEDDING,
        options=["--layer-ids", "outputs"],
    ),
    "speculators": Source("speculators", "eagle3", SPECULATORS_CONFIG, SPECULATORS),
    "speculators with two layers and input_norm": Source(
        "speculators",
        "eagle3",
        {
            **SPECULATORS_CONFIG,
            "norm_before_fc": True,
            "norm_output": True,
            "transformer_layer_config": {**SPECULATORS_CONFIG["transformer_layer_config"], "num_hidden_layers": 2},
        },
        SPECULATORS + INPUT_NORM + SECOND_LAYER,
    ),
    "speculators p-eagle": Source(
        "speculators",
        "p-eagle",
        {
            **SPECULATORS_CONFIG,
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "speculators_config": {**SPECULATORS_CONFIG["speculators_config"], "algorithm": "peagle"},
            "norm_before_residual": False,
            "mask_token_id": 7,
        },
        SPECULATORS + MASK_HIDDEN,
    ),
    "speculators-mtp": Source("speculators-mtp", "mtp", MTP_CONFIG, MTP + MTP_NORMS),
    "speculators-mtp with every flag": Source(
        "speculators-mtp",
        "mtp",
        {
            **MTP_CONFIG,
            "transformer_layer_config": {**LLAMA, "rope_theta": 10000.0},
            "num_nextn_predict_layers": 2,
            "draft_vocab_size": V,
            "hidden_first": True,
            "pre_norm": True,
            "norm_recycled": False,
            "zero_first": True,
            "centered_norms": True,
        },
        MTP + MTP_SECOND,
    ),
    "medusa": Source(
        "medusa",
        "medusa",
        {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "some/target"},
        MEDUSA,
        file="medusa_lm_head.safetensors",
    ),
    "vllm-medusa": Source("vllm-medusa", "medusa", VLLM_MEDUSA_CONFIG, VLLM_MEDUSA),
    "vllm-medusa shared and truncated": Source(
        "vllm-medusa",
        "medusa",
        {
            **{
                key: value for key, value in VLLM_MEDUSA_CONFIG.items() if key not in ("num_heads", "num_hidden_layers")
            },
            "medusa_num_heads": 2,
            "medusa_num_layers": 1,
            "truncated_vocab_size": VD,
            "original_lm_head": True,
            "medusa_fc_bias": False,
        },
        VLLM_MEDUSA_SMALL,
    ),
    "ibm-mlp": Source("ibm-mlp", "mlp", MLP_CONFIG, MLP),
    "ibm-mlp tied": Source(
        "ibm-mlp",
        "mlp",
        {**MLP_CONFIG, "inner_dim": 0, "tie_weights": True, "scale_input": False},
        MLP_TIED,
    ),
    "arctic-lstm": Source("arctic-lstm", "lstm", LSTM_CONFIG, LSTM),
    "arctic-lstm untied": Source(
        "arctic-lstm",
        "lstm",
        {**LSTM_CONFIG, "tie_lstm_embs": False, "scale_input": False, "base_model_archs": ["LlamaForCausalLM"]},
        LSTM + LSTM_EMBEDDINGS,
    ),
    "arctic-lstm stacks": Source(
        "arctic-lstm",
        "lstm",
        {
            **{key: value for key, value in LSTM_CONFIG.items() if key != "method"},
            "inner_dim": [40, 48],
            "emb_dim": "40.40",
            "proj_dim": "40.40",
            "tie_weights": False,
            "tie_lstm_embs": False,
            "num_lookahead_tokens": 2,
        },
        STACKS,
    ),
    **TRAINED_SOURCES,
    **BLOCK_SOURCES,
}
