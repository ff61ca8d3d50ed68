"""Granite 4.0-H (GraniteMoeHybridForCausalLM): Mamba-2 in most layers, attention without positions in the others.

Granite's multipliers (granite.py). Some have experts beside an MLP that every token uses, others that MLP alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from models.config import ATTENTION, RECURRENT, ExpertsConfig, TargetConfig
from models.decoder import DecoderLayer
from models.fields import Fields
from models.layers import GatedMLP
from models.mixers.layers import RecurrentLayer
from models.mixers.mamba2 import NO_LIMIT, Mamba2, read_mamba2
from models.targets.experts import MixtureOfExperts
from models.targets.granite import GraniteTarget
from models.targets.lfm2 import typed_mixers

# transformers' defaults for keys that a config.json may omit
DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
}  # fmt: skip
LAYER_TYPES = {
    **dict.fromkeys(("mamba", "linear_attention"), RECURRENT),
    **dict.fromkeys(("attention", "full_attention"), ATTENTION),
}
# Llama's names, and ours of a recurrent layer and of experts -> Granite's
NAMES = {
    r"\.mixer\.o_proj\.": ".mamba.out_proj.",
    r"\.mixer\.conv\.": ".mamba.conv1d.",
    r"\.mixer\.": ".mamba.",
    r"\.mlp\.gate\.": ".block_sparse_moe.router.layer.",
    r"\.block_sparse_moe\.router\.weight": ".block_sparse_moe.router.layer.weight",  # of newer files
    r"\.mlp\.experts\.": ".block_sparse_moe.experts.",
    r"\.mlp\.(?:shared_experts\.)?(gate|up)_proj\.": r".shared_mlp.\1_proj.",
    r"\.mlp\.(?:shared_experts\.)?down_proj\.": ".shared_mlp.output_linear.",
}
EXPERT = re.compile(r"(.*\.block_sparse_moe)\.experts\.(\d+)\.(gate|down)_proj\.weight")


class GraniteExperts(MixtureOfExperts):
    """Experts, and an MLP that every token uses."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__(hidden_size, config)
        self.shared_experts = GatedMLP(hidden_size, config.shared_size)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x, self.shared_experts(x, residual))


class GraniteHybridTarget(GraniteTarget):
    renamed = NAMES

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        config = DEFAULTS | {key: value for key, value in config.items() if value is not None}
        fields = Fields(config)
        fields.only("position_embedding_type", "rope", "nope")
        fields.only("time_step_limit", *NO_LIMIT)
        fields.only("normalization_function", "rmsnorm")
        shared, count = fields.size("shared_intermediate_size"), fields.take("num_local_experts", int, 0)
        base = super().read_config(config | {"intermediate_size": shared})
        experts = None
        if count:
            active = fields.size("num_experts_per_tok", limit=fields.size("num_local_experts"))
            inner = fields.size("intermediate_size")
            experts = ExpertsConfig(count, active, inner, normalize=True, shared_size=shared)
        types = fields.take("layer_types", list, fields.take("layers_block_type", list, []))
        mixers = typed_mixers(types, base.num_layers, LAYER_TYPES)
        inner_size = int(fields.positive("mamba_expand", 2) * base.hidden_size)
        return replace(
            base,
            mlp_bias=False,  # whatever is stated: transformers has none
            unrotated=config.get("position_embedding_type") != "rope",
            experts=experts,
            mixers=mixers if RECURRENT in mixers else (),  # some have none
            recurrent=read_mamba2(config, inner_size) if RECURRENT in mixers else None,
        )

    @staticmethod
    def make_layer(config: TargetConfig, index: int) -> nn.Module:
        mlp = config.experts and GraniteExperts(config.hidden_size, config.experts)
        if config.mixes(index, ATTENTION):
            return DecoderLayer(config, index, mlp)
        return RecurrentLayer(config, Mamba2(config, index), mlp)

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge gate and up, and stack the experts of a layer."""
        kept, experts = dict[str, Tensor](), dict[str, list[Tensor]]()
        for name, value in tensors.items():
            match, up = EXPERT.fullmatch(name), tensors.get(name.replace(".gate_proj.", ".up_proj."))
            rows = torch.cat([value, up]) if up is not None and ".gate_proj." in name else value
            if match is not None:
                stored = f"{match[1]}.{'input' if match[3] == 'gate' else 'output'}_linear.weight"
                experts.setdefault(stored, []).append(rows)
            elif ".up_proj." not in name:
                kept[name.replace(".gate_proj.", ".input_linear.")] = rows
        return kept | {name: torch.stack(values) for name, values in experts.items()}
