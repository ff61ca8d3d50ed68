"""DeepSeek-V3 and R1 (DeepseekV3ForCausalLM, arXiv 2412.19437) and DeepSeek-V2 (DeepseekV2ForCausalLM).

Latent attention (latent.py). After the first layers experts take the MLP's place, beside an MLP that every token uses:
V3 chooses them by a sigmoid plus a learned bias, V2 by a softmax, both within the best groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kernels.elementwise import uniform
from models.config import ExpertsConfig, LatentConfig, TargetConfig
from models.decoder import DecoderLayer
from models.fields import Fields
from models.layers import GatedMLP, Linear, yarn_magnitude
from models.targets.experts import MixtureOfExperts, best
from models.targets.latent import LatentAttention
from models.targets.llama import LlamaTarget

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1}


class Router(Linear):
    """The scores of experts, in fp32 whatever the model's dtype is, as published."""

    def __init__(self, hidden_size: int, experts: ExpertsConfig) -> None:
        super().__init__(hidden_size, experts.count, bias=False)
        if experts.sigmoid:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(experts.count), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        super()._apply(fn, recurse)
        for parameter in self.parameters():
            parameter.data = parameter.data.float()
        return self


class DeepseekExperts(MixtureOfExperts):
    eps = 1e-20  # added to the sum that weights are divided by

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__(hidden_size, config)
        self.gate = Router(hidden_size, config)
        if config.shared_size:
            self.shared_experts = GatedMLP(hidden_size, config.shared_size)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x, self.shared_experts(x, residual) if self.config.shared_size else residual)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        logits = self.gate(rows.float())
        scores = uniform(torch.sigmoid, logits) if config.sigmoid else logits.softmax(-1)
        ranked = scores + self.gate.e_score_correction_bias if config.sigmoid else scores
        if config.groups > 1:
            grouped = ranked.unflatten(-1, (config.groups, -1))  # [R, G, E / G]
            highest = grouped.sort(dim=-1, descending=True).values
            strength = highest[..., :2].sum(-1) if config.sigmoid else highest[..., 0]
            offered = torch.zeros_like(strength, dtype=torch.bool)
            offered.scatter_(1, best(strength, config.active_groups), True)
            ranked = grouped.masked_fill(~offered[..., None], float("-inf")).flatten(1)
        chosen = best(ranked, config.active)
        weights = scores.gather(1, chosen)
        if config.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        return weights * config.scale, chosen


class DeepseekV3Target(LlamaTarget):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        config = DEFAULTS | config
        fields = Fields(config)
        for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
            fields.only(key, value)
        normalize = fields.take("norm_topk_prob", bool, False)
        return read_shared(config, sigmoid=True, normalize=normalize, groups=fields.size("n_group", 8))

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> DecoderLayer:
        experts, size = config.experts, config.hidden_size
        assert experts is not None
        mlp = DeepseekExperts(size, experts) if index >= experts.first_layer else None
        return DecoderLayer(config, index, mlp, LatentAttention(config, index))


class DeepseekV2Target(DeepseekV3Target):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        fields = Fields(config)
        for key, value in (("scoring_func", "softmax"), ("moe_layer_freq", 1), ("norm_topk_prob", False)):
            fields.only(key, value)
        fields.only("topk_method", "greedy", "group_limited_greedy")
        limited = config.get("topk_method") == "group_limited_greedy"
        groups = fields.size("n_group") if limited else 1
        return read_shared(config, sigmoid=False, normalize=False, groups=groups)


def read_shared(config: dict[str, Any], *, sigmoid: bool, normalize: bool, groups: int) -> TargetConfig:
    """Read what V2 and V3 have in common. Raises ValueError naming a key."""
    fields, base = Fields(config), TargetConfig.from_json(config)
    if base.num_kv_heads != base.num_heads:
        raise ValueError(
            f"config.json: num_key_value_heads={base.num_kv_heads}: must be num_attention_heads={base.num_heads}, as "
            "every head has its own projection of the latent"
        )
    count, inner = fields.size("n_routed_experts"), fields.size("moe_intermediate_size")
    if count % groups or (sigmoid and groups > 1 and count == groups):
        raise ValueError(f"config.json: n_group={groups}: must divide the {count} experts in groups of two or more")
    active_groups = fields.size("topk_group", limit=groups) if groups > 1 else 1
    experts = ExpertsConfig(
        count=count,
        active=fields.size("num_experts_per_tok", limit=count // groups * active_groups),
        intermediate_size=inner,
        normalize=normalize,
        sigmoid=sigmoid,
        groups=groups,
        active_groups=active_groups,
        scale=fields.positive("routed_scaling_factor", 1.0),
        shared_size=inner * fields.take("n_shared_experts", int, 0),
        first_layer=fields.take("first_k_dense_replace", int, 0),
    )
    rotated = fields.size("qk_rope_head_dim")
    if rotated % 2:
        raise ValueError(f"config.json: qk_rope_head_dim={rotated}: must be even")
    latent = LatentConfig(
        rank=fields.size("kv_lora_rank"),
        query_rank=None if config.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        key_size=fields.size("qk_nope_head_dim"),
        value_size=fields.size("v_head_dim"),
        interleaved=fields.take("rope_interleave", bool, True),
    )
    numbers = dict(base.rope.parameters)
    magnitude = yarn_magnitude(numbers.get("factor", 1.0), numbers.get("mscale_all_dim", 0.0))
    return replace(
        base,
        head_dim=latent.value_size,
        rotary_dim=rotated,
        attention_scale=(latent.key_size + rotated) ** -0.5 * magnitude**2,
        experts=experts,
        latent=latent,
    )
