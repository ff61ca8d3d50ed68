"""gpt-oss (GptOssForCausalLM): attention with sinks, windows in every second layer, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from models.config import ExpertsConfig, TargetConfig
from models.fields import Fields
from models.stacked_experts import stack
from models.targets.llama import LlamaTarget
from models.targets.qwen2 import typed_windows

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "rope_theta": 150_000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
NAMES = {r"\.mlp\.gate\.": ".mlp.router."}


class GptOssTarget(LlamaTarget):
    renamed = NAMES

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        fields, config = Fields(config), DEFAULTS | config
        if not (config.get("rope_scaling") or config.get("rope_parameters")):
            config["rope_scaling"] = YARN
        base, count = super().read_config(config), fields.size("num_local_experts", 128)
        active = fields.size("num_experts_per_tok", 4, limit=count)
        clamp = fields.positive("swiglu_limit", 7.0), fields.positive("swiglu_alpha", 1.702)
        alternating = [("sliding_attention", "full_attention")[layer % 2] for layer in range(base.num_layers)]
        types = fields.take("layer_types", list, alternating)
        return replace(
            base,
            windows=typed_windows(types, fields.size("sliding_window", 128), base.num_layers),
            experts=ExpertsConfig(count, active, base.intermediate_size, normalize=True, clamp=clamp),
            sinks=True,
        )

    def as_stored(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return stack(tensors)
