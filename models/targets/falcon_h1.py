"""Falcon-H1 (FalconH1ForCausalLM): Mamba-2 beside attention in every layer, both of the same input.

Constants multiply embedding, logits, keys, and inputs and outputs of Mamba-2, attention and MLP. They are multiplied
where no number is rounded more often for it: those of attention's input and of keys are a part of its scale and of its
output's factor. llama.cpp's files hold them within their weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kernels.elementwise import silu_mul
from models.attention import Rotary
from models.config import BOTH, TargetConfig
from models.decoder import DecoderLayer
from models.fields import Fields
from models.layers import GatedMLP
from models.mixers.mamba2 import NO_LIMIT, Mamba2, Mamba2Config, read_mamba2
from models.targets.llama import LlamaTarget

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "mamba_d_ssm": 1024,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
}  # fmt: skip
# Llama's names, and ours of Mamba-2 -> Falcon-H1's
NAMES = {
    r"^model\.norm\.": "model.final_layernorm.",
    r"\.post_attention_layernorm\.": ".pre_ff_layernorm.",
    r"\.mixer\.o_proj\.": ".mamba.out_proj.",
    r"\.mixer\.conv\.": ".mamba.conv1d.",
    r"\.mixer\.": ".mamba.",
    r"\.mlp\.": ".feed_forward.",
}


@dataclass(frozen=True)
class FalconConfig(Mamba2Config):
    outputs: tuple[float, ...] = (1.0, 1.0)  # factors of what attention and Mamba-2 add to the residual stream
    mlp: tuple[float, ...] = (1.0, 1.0)  # of the MLP's gate before its activation, and of its output


class ScaledMLP(GatedMLP):
    """`down(silu(s gate(x)) * up(x)) * t`."""

    def __init__(self, hidden_size: int, intermediate_size: int, scales: tuple[float, ...], *, bias: bool) -> None:
        super().__init__(hidden_size, intermediate_size, bias=bias)
        self.scales = scales

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        gate, up = self.gate_up_proj(x).float().chunk(2, dim=-1)
        inner = silu_mul(torch.cat([self.scales[0] * gate, up], dim=-1)).to(x.dtype)
        out = self.down_proj(inner) * self.scales[1]
        return out if residual is None else residual + out


class FalconLayer(DecoderLayer):
    def __init__(self, config: TargetConfig, index: int) -> None:
        own = config.recurrent
        assert isinstance(own, FalconConfig)
        plain, size, inner = own.mlp == (1.0, 1.0), config.hidden_size, config.intermediate_size
        super().__init__(config, index, None if plain else ScaledMLP(size, inner, own.mlp, bias=config.mlp_bias))
        self.mixer, self.outputs = Mamba2(config, index), own.outputs

    def forward(self, x: Tensor, rotary: Rotary, attention: Any, reach: int = 0) -> Tensor:
        normed = self.input_layernorm(x)
        attended, mixed = self.self_attn(normed, rotary, attention, reach=reach), self.mixer(normed, attention)
        x = x + (attended * self.outputs[0] + mixed * self.outputs[1])
        return self.mlp(self.post_attention_layernorm(x), x)

    def parts(self) -> None:
        return None


class FalconH1Target(LlamaTarget):
    renamed = NAMES

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        config = DEFAULTS | config
        fields = Fields(config)
        fields.only("time_step_limit", *NO_LIMIT)
        fields.only("mamba_use_mlp", True)
        fields.only("attn_layer_indices")
        base = TargetConfig.from_json(config)
        inner = config["mamba_d_ssm"] or int(fields.positive("mamba_expand", 2) * base.hidden_size)
        names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
        embedding, lm_head, key, attention_in, attention_out, ssm_in, ssm_out = (
            fields.positive(f"{name}_multiplier", 1.0) for name in names
        )
        mixer = read_mamba2(config, inner)
        for bias, name, scale in (
            ("attention_bias", "attention_in_multiplier", attention_in),
            ("mamba_proj_bias", "ssm_in_multiplier", ssm_in),
        ):
            if scale != 1 and config.get(bias):
                raise ValueError(f"config.json: {name}={scale}: beside {bias} only 1.0 is supported")
        norm = "before the gate" if fields.take("mamba_norm_before_gate", bool, True) else "after the gate"
        options: dict[str, Any] = {
            "output_bias": fields.take("projectors_bias", bool, False),
            "norm": norm if fields.take("mamba_rms_norm", bool, False) else "none",
            "scales": tuple(ssm_in * scale for scale in multipliers(fields, "ssm_multipliers", 5)),
            "outputs": (attention_in * attention_out, ssm_out),
            "mlp": multipliers(fields, "mlp_multipliers", 2),
        }
        return replace(
            base,
            attention_scale=attention_in**2 * key / math.sqrt(base.head_dim),
            embedding_scale=embedding,
            logits_scaling=1 / lm_head,
            mixers=(BOTH,) * base.num_layers,
            recurrent=FalconConfig(**vars(mixer) | options),
        )

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> nn.Module:
        return FalconLayer(config, index)


def multipliers(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    """Return a list of so many factors, which are one where it is absent. Raises ValueError naming it."""
    values = fields.take(key, list, [1.0] * count)
    if len(values) != count or any(type(each) not in (int, float) or not 0 < each < math.inf for each in values):
        raise ValueError(f"{fields.name}: {key}={values!r}: must be {count} positive numbers")
    return tuple(map(float, values))
