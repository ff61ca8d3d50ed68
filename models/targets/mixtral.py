"""Mixtral (MixtralForCausalLM, arXiv 2401.04088): Mistral with a mixture of experts in place of the MLP.

The weights of the active experts are their softmax over all experts, divided by its sum: the softmax over them alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.config import ExpertsConfig, TargetConfig
from models.fields import Fields
from models.targets.mistral import MistralTarget

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
}
NAMES = {
    **{r"\.mlp\.": ".block_sparse_moe.", r"\.gate_proj\.": ".w1.", r"\.up_proj\.": ".w3."},
    r"\.down_proj\.": ".w2.",
}


class MixtralTarget(MistralTarget):
    renamed = NAMES

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        base, fields = super().read_config(DEFAULTS | config), Fields(config)
        count = fields.size("num_local_experts", 8)
        active = fields.size("num_experts_per_tok", 2, limit=count)
        return replace(base, experts=ExpertsConfig(count, active, base.intermediate_size, normalize=True))
