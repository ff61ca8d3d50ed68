"""Heads on the model hub: the keys of their config.json and the names of their tensors, at the sizes of sources.py.

Keys are those of the files on the hub, or of the program that wrote them where a file could not be seen; numbers that
are no size are theirs too. A head named for one model stands for those of the same layout for others.
"""

from __future__ import annotations

from typing import Any

from tests.formats.block_sources import DFLASH, DFLASH_CONFIG
from tests.formats.source import VD, H, Row, Source, V

PICKLE = "pytorch_model.bin"
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": 160,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": V,
}
LLAMA2 = COMMON | {"num_key_value_heads": 8, "pretraining_tp": 1, "rope_scaling": None}
LLAMA3 = COMMON | {"bias": False, "num_key_value_heads": 2, "rope_theta": 500000.0}
QWEN2 = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "qkv_bias": True,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
MIXTRAL = COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
EAGLE3 = COMMON | {"draft_vocab_size": VD, "num_key_value_heads": 2}
SPECFORGE = EAGLE3 | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "max_window_layers": 64,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
}
MODELOPT = EAGLE3 | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],  # 1, N/2 - 1 and N - 4 of its target's outputs
        "next_layer_regular": True,
        "parallel_draft_heads_num_layers": None,
        "parallel_draft_step": 1,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    },
    "head_dim": 8,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_theta": 500000.0,
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "base_model_ep_plan": None,
    "draft_vocab_size": VD,
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": [], "name_or_path": "/a/folder/of/their/machine"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.2.0.dev11",
    "target_hidden_size": None,
    "torch_dtype": "float32",
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_cache": True,
        "vocab_size": V,
    },
    "transformers_version": "4.53.2",
}
MEDUSA = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,  # of the five in the file
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}
VLLM_MEDUSA = {
    "_name_or_path": "abhigoyal/vllm-medusa-vicuna-7b-v1.3",
    "architectures": ["MedusaModel"],
    "hidden_size": H,
    "model_type": "medusa",
    "num_heads": 5,
    "num_hidden_layers": 1,
    "transformers_version": "4.41.2",
    "truncated_vocab_size": None,
    "vocab_size": V,
}
IBM = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "base_model_name_or_path": "ibm-granite/granite-7b-instruct",
    "emb_dim": H,
    "inner_dim": H,
    "model_type": "mlp_speculator",
    "n_candidates": 5,
    "n_predict": 5,
    "top_k_tokens_per_head": [4, 3, 2, 2, 2],
    "torch_dtype": "float16",
    "transformers_version": "4.38.2",
    "vocab_size": V,
}
IBM_20B = IBM | {"inner_dim": 40, "n_predict": 4, "top_k_tokens_per_head": [5, 3, 2, 2]}


def layer(prefix: str, kv_heads: int, *, inputs: int = H, hidden: int = H) -> list[Row]:
    """Return the rows of a Llama layer of 8 heads of 8; `prefix` is the published name of our layers.0."""
    shapes = {
        "self_attn.q_proj": (64, inputs),
        "self_attn.k_proj": (8 * kv_heads, inputs),
        "self_attn.v_proj": (8 * kv_heads, inputs),
        "self_attn.o_proj": (hidden, 64),
        "mlp.gate_proj": (160, hidden),
        "mlp.up_proj": (160, hidden),
        "mlp.down_proj": (hidden, 160),
        "post_attention_layernorm": (hidden,),
    }
    return [(f"{prefix}.{name}.weight", f"layers.0.{name}.weight", shape) for name, shape in shapes.items()]


def same(*rows: tuple[str, tuple[int, ...]]) -> list[Row]:
    return [(name, name, shape) for name, shape in rows]


def eagle(kv_heads: int, *more: tuple[str, tuple[int, ...]]) -> list[Row]:
    return [*same(("embed_tokens.weight", (V, H)), ("fc.weight", (H, 2 * H)), *more), *layer("layers.0", kv_heads)]


def eagle3(prefix: str, *more: tuple[str, tuple[int, ...]], hidden: int = H) -> list[Row]:
    norms = [
        (f"{prefix}.{name}.weight", f"layers.0.{name}.weight", (hidden,)) for name in ("hidden_norm", "input_layernorm")
    ]
    rest = same(
        ("fc.weight", (hidden, 3 * H)),
        ("norm.weight", (hidden,)),
        ("lm_head.weight", (VD, hidden)),
        ("d2t", (VD,)),
        ("t2d", (V,)),
        *more,
    )
    return [*rest, *norms, *layer(prefix, 2, inputs=2 * hidden, hidden=hidden)]


def medusa(*, ours: bool) -> list[Row]:
    rows: list[Row] = []
    for head in range(5):
        block, lm_head = f"blocks.{head}.layers.0", f"lm_heads.{head}.weight"
        rows.append((f"{block}.weight" if ours else f"{head}.0.linear.weight", f"{block}.weight", (H, H)))
        rows.append((lm_head if ours else f"{head}.1.weight", lm_head, (V, H)))
        if not ours:
            rows.append((f"{head}.0.linear.bias", f"{block}.bias", (H,)))
    return rows


def ibm(count: int, inner: int) -> list[Row]:
    shapes: dict[str, tuple[int, ...]] = {
        "emb.{}.weight": (V, inner),
        "proj.{}.weight": (inner, inner),
        "head.{}.weight": (V, inner),
        "ln.{}.weight": (inner,),
        "ln.{}.bias": (inner,),
    }
    rows = {name.format(index): shape for name, shape in shapes.items() for index in range(count)}
    rows["proj.0.weight"] = (inner, H)
    return [(f"speculator.{name}", name, shape) for name, shape in rows.items()]


FC_BIAS = ("fc.bias", (H,))
QKV_BIASES = [(f"layers.0.self_attn.{name}_proj.bias", (size,)) for name, size in (("q", 64), ("k", 16), ("v", 16))]
EMBEDDING = ("embed_tokens.weight", (V, H))
PUBLISHED = {
    "yuhuili/EAGLE-Vicuna-7B-v1.3": Source("safeailab-eagle", "eagle", COMMON, eagle(8, FC_BIAS), PICKLE),
    "yuhuili/EAGLE-Vicuna-33B-v1.3": Source(
        "safeailab-eagle", "eagle", COMMON | {"max_sequence_length": 2048}, eagle(8, FC_BIAS), PICKLE
    ),
    "yuhuili/EAGLE-llama2-chat-7B": Source("safeailab-eagle", "eagle", LLAMA2, eagle(8, FC_BIAS), PICKLE),
    "yuhuili/EAGLE-llama2-chat-70B": Source(
        "safeailab-eagle", "eagle", LLAMA2 | {"num_key_value_heads": 1}, eagle(1, FC_BIAS), PICKLE
    ),
    "yuhuili/EAGLE-mixtral-instruct-8x7B": Source("safeailab-eagle", "eagle", MIXTRAL, eagle(8, FC_BIAS), PICKLE),
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": Source("safeailab-eagle", "eagle", LLAMA3, eagle(2), PICKLE),
    "yuhuili/EAGLE-Qwen2-7B-Instruct": Source(
        "safeailab-eagle", "eagle", QWEN2, eagle(2, FC_BIAS, *QKV_BIASES), PICKLE
    ),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Source("safeailab-eagle3", "eagle3", EAGLE3, eagle3("midlayer"), PICKLE),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": Source(
        "safeailab-eagle3",
        "eagle3",
        EAGLE3 | {"head_dim": 8, "hidden_size": 48, "target_hidden_size": H},
        eagle3("midlayer", ("embed_tokens.weight", (V, 48)), hidden=48),
        PICKLE,
    ),
    "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge": Source(
        "safeailab-eagle3", "eagle3", SPECFORGE, eagle3("midlayer", EMBEDDING)
    ),
    "nvidia/Llama-3.3-70B-Instruct-Eagle3": Source("safeailab-eagle3", "eagle3", MODELOPT, eagle3("midlayer")),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": Source(
        "speculators", "eagle3", SPECULATORS, eagle3("layers.0", EMBEDDING)
    ),
    "FasterDecoding/medusa-vicuna-7b-v1.3": Source("medusa", "medusa", MEDUSA, medusa(ours=False), "medusa_lm_head.pt"),
    "abhigoyal/vllm-medusa-vicuna-7b-v1.3": Source("vllm-medusa", "medusa", VLLM_MEDUSA, medusa(ours=True)),
    "ibm-granite/granite-7b-instruct-accelerator": Source("ibm-mlp", "mlp", IBM, ibm(5, H)),
    "ibm-granite/granite-20b-code-instruct-accelerator": Source("ibm-mlp", "mlp", IBM_20B, ibm(4, 40)),
    "z-lab/Qwen3-8B-DFlash-b16": Source("dflash", "dflash", DFLASH_CONFIG, DFLASH),
}
