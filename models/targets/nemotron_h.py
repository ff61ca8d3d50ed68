"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NemotronHForCausalLM): blocks of one sublayer each.

A block is Mamba-2, attention without positions, an MLP of the square of ReLU, or a mixture of such MLPs beside one that
every token uses; its experts may read a projection of the row (LatentMoE). transformers limits the time step from below
where it reads a prompt in chunks, and not where it reads a token; here it has no limit, as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import Attention, Rotary
from models.config import ATTENTION, NEITHER, RECURRENT, ExpertsConfig, TargetConfig
from models.decoder import DecoderLayer, SelfAttention
from models.fields import Fields
from models.layers import Linear, PlainMLP, RMSNorm
from models.mixers.mamba2 import NEMOTRON, NO_LIMIT, Mamba2, Mamba2Config, read_mamba2
from models.targets.deepseek import DeepseekExperts
from models.targets.lfm2 import typed_mixers
from models.targets.llama import LlamaTarget

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "intermediate_size": 21504, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
    "conv_kernel": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}  # fmt: skip
MLP, MOE = "mlp", "moe"
PATTERN = {"M": "mamba", "*": "attention", "-": MLP, "E": MOE}
LAYER_TYPES = {
    **dict.fromkeys(("mamba", "linear_attention"), RECURRENT),
    **dict.fromkeys(("attention", "full_attention"), ATTENTION),
    **dict.fromkeys((MLP, MOE), NEITHER),
}
ONLY = {  # options that have one value in all published configs
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "n_shared_experts": 1,
    "attention_bias": False,
    "mamba_proj_bias": False,
}
# Llama's names, and ours of blocks -> Nemotron's
NAMES = {
    r"^model\.(embed_tokens|embeddings)\.": "backbone.embeddings.",
    r"^model\.(norm|norm_f)\.": "backbone.norm_f.",
    r"^model\.": "backbone.",
    r"\.input_layernorm\.": ".norm.",
    r"\.mamba\.o_proj\.": ".mixer.out_proj.",
    r"\.mamba\.conv\.": ".mixer.conv1d.",
    r"\.(mamba|self_attn|mlp)\.": ".mixer.",
}


@dataclass(frozen=True)
class NemotronConfig(Mamba2Config):
    sparse: tuple[int, ...] = ()  # the layers that are a mixture of experts
    latent_size: int | None = None  # of what experts read


class NemotronExperts(DeepseekExperts):
    """DeepSeek's choice of experts; they and the MLP beside them have no gates."""

    def __init__(self, config: TargetConfig) -> None:
        experts, own, size = config.experts, config.recurrent, config.hidden_size
        assert experts is not None
        assert isinstance(own, NemotronConfig)
        super().__init__(size, replace(experts, shared_size=0))
        self.shared_experts = PlainMLP(size, experts.shared_size, activation="relu2", bias=config.mlp_bias)
        self.has_latent = own.latent_size is not None
        if own.latent_size is not None:
            self.experts = nn.ModuleList(self.make_expert(own.latent_size, experts) for _ in range(experts.count))
            self.fc1_latent_proj = Linear(size, own.latent_size, bias=config.mlp_bias)
            self.fc2_latent_proj = Linear(own.latent_size, size, bias=config.mlp_bias)
            self.fc2_latent_proj.out_dtype = torch.float32  # as of all that is added to the residual stream

    @staticmethod
    def make_expert(hidden_size: int, config: ExpertsConfig) -> nn.Module:
        return PlainMLP(hidden_size, config.intermediate_size, activation="relu2", bias=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        shared: Tensor = self.shared_experts(x, residual)
        if not self.has_latent:
            return super().forward(x, shared)
        rows = x.reshape(-1, x.shape[-1])
        out = self.mix(self.fc1_latent_proj(rows), *self.route(rows), shared.dtype)
        return shared + self.fc2_latent_proj(out.to(x.dtype)).view_as(x)


class NemotronBlock(nn.Module):
    """Mamba-2, an MLP or experts."""

    rotary_table = 0

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        assert isinstance(config.recurrent, NemotronConfig)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        size, inner = config.hidden_size, config.intermediate_size
        if config.mixes(layer, RECURRENT):
            self.mamba = Mamba2(config, layer)
        elif layer in config.recurrent.sparse:
            self.mlp = NemotronExperts(config)
        else:
            self.mlp = PlainMLP(size, inner, activation="relu2", bias=config.mlp_bias)

    def forward(self, x: Tensor, rotary: Rotary, attention: Any) -> Tensor:
        normed = self.input_layernorm(x)
        return self.mamba(normed, attention, x) if hasattr(self, "mamba") else self.mlp(normed, x)

    def parts(self) -> None:
        return None


class NemotronAttention(DecoderLayer):
    """A block of attention alone."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        nn.Module.__init__(self)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn, self.mlp = SelfAttention(config, layer), None

    def forward(self, x: Tensor, rotary: Rotary, attention: Attention, reach: int = 0) -> Tensor:
        return self.self_attn(self.input_layernorm(x), rotary, attention, x, reach)

    @property
    def forward_norm(self) -> RMSNorm:
        return self.input_layernorm  # for heads, whose layers have an MLP

    def parts(self) -> None:
        return None


class NemotronHTarget(LlamaTarget):
    renamed = NAMES

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        config = DEFAULTS | {key: value for key, value in config.items() if value is not None}
        fields, types = Fields(config), block_types(config)
        for key, value in ONLY.items():
            fields.only(key, value)
        fields.only("time_step_limit", *NO_LIMIT)
        fields.only("sliding_window")
        fields.only("attention_head_dim", config["head_dim"])  # of older files
        eps = {"rms_norm_eps": fields.positive("layer_norm_epsilon", 1e-5)}
        sizes = {"num_hidden_layers": len(types), "hidden_act": "relu2"}
        base = TargetConfig.from_json(config | eps | sizes, activation="relu2")
        latent = fields.size("moe_latent_size") if "moe_latent_size" in config else None
        sparse = tuple(layer for layer, kind in enumerate(types) if kind == MOE)
        own = NemotronConfig(**vars(read_mamba2(config, keys=NEMOTRON)), sparse=sparse, latent_size=latent)
        return replace(
            base,
            unrotated=True,
            experts=read_experts(fields) if sparse else None,
            mixers=typed_mixers(types, base.num_layers, LAYER_TYPES),
            recurrent=own,
        )

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> nn.Module:
        return (NemotronAttention if config.mixes(index, ATTENTION) else NemotronBlock)(config, index)


def block_types(config: dict[str, Any]) -> list[str]:
    """Read `layers_block_type`, or the letters of `hybrid_override_pattern`. Raises ValueError for another letter."""
    fields = Fields(config)
    types = fields.take("layers_block_type", list, fields.take("layer_types", list, []))
    if types:
        return list(map(str, types))
    pattern = fields.need("hybrid_override_pattern", str)
    if unknown := set(pattern) - set(PATTERN):
        raise ValueError(
            f"config.json: hybrid_override_pattern={pattern!r}: {min(unknown)!r} is none of {' '.join(PATTERN)}"
        )
    return [PATTERN[letter] for letter in pattern]


def read_experts(fields: Fields) -> ExpertsConfig:
    count, groups = fields.size("n_routed_experts"), fields.size("n_group", 1)
    if count % groups or (groups > 1 and count == groups):
        raise ValueError(f"config.json: n_group={groups}: must divide the {count} experts in groups of two or more")
    active_groups = fields.size("topk_group", 1, limit=groups)
    return ExpertsConfig(
        count=count,
        active=fields.size("num_experts_per_tok", limit=count // groups * active_groups),
        intermediate_size=fields.size("moe_intermediate_size"),
        normalize=fields.take("norm_topk_prob", bool, True),
        sigmoid=True,
        groups=groups,
        active_groups=active_groups,
        scale=fields.positive("routed_scaling_factor", 1.0),
        shared_size=fields.size("moe_shared_expert_intermediate_size"),
    )
