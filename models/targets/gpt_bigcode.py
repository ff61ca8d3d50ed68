"""GPT-BigCode (GPTBigCodeForCausalLM: StarCoder, arXiv 2305.06161, Granite's 20B code model): one KV head for all.

In GGUF files this is llama.cpp's architecture starcoder,
which approximates GELU by tanh where some config.json ask for the exact function.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from models.config import TargetConfig
from models.targets.learned import LearnedTarget, read_learned

RENAMED = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-5,
}
POSITIONS = 1024  # likewise; of two names


class GPTBigCodeTarget(LearnedTarget):
    root = "transformer."
    layer_list = "h"
    in_layer: ClassVar = {
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }
    outside: ClassVar = {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"}

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        config = {"max_position_embeddings": POSITIONS, **DEFAULTS, **config}
        if not config.get("multi_query", True):
            raise ValueError("config.json: multi_query=false: a KV head for each query head is not supported")
        if config.get("add_cross_attention"):
            raise ValueError("config.json: add_cross_attention=true: an encoder's output is not supported")
        size = config.get("n_embd") or config.get("hidden_size")
        if config.get("n_inner") is None and type(size) is int:
            config["n_inner"] = 4 * size
        base = read_learned(config, RENAMED, ("gelu_pytorch_tanh", "gelu"))
        return replace(
            base,
            num_kv_heads=1,
            attention_bias=True,
            output_bias=True,
            mlp_bias=True,
            attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
        )
