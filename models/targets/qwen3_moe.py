"""Qwen3-MoE (Qwen3MoeForCausalLM): Qwen3 with a mixture of experts in place of the MLP.

A row's experts are applied in ascending order, whatever experts other rows use, so that its sum has a fixed order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from models.config import ExpertsConfig, TargetConfig
from models.decoder import DecoderLayer
from models.layers import GatedMLP, Linear
from models.targets.qwen3 import Qwen3Target


class MixtureOfExperts(nn.Module):
    """The weighted sum of the outputs of the `active` experts that are likeliest by the router's softmax over all."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden_size, config.count, bias=False)
        self.experts = nn.ModuleList(GatedMLP(hidden_size, config.intermediate_size) for _ in range(config.count))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # [R, H]
        # Sorted, not topk: ties must be broken the same way in any batch.
        ranked = self.gate(rows).float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights, chosen = ranked.values[:, : self.config.active], ranked.indices[:, : self.config.active]
        if self.config.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():  # ascending
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            output = self.experts[expert](rows[row])
            out.index_add_(0, row, output * weights[row, rank, None].to(output.dtype))
        out = out.view_as(x)
        return out if residual is None else residual + out


class Qwen3MoeTarget(Qwen3Target):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        if config.get("use_sliding_window", False):
            raise ValueError("config.json: use_sliding_window=true: not supported for Qwen3MoeForCausalLM")
        config = {"num_experts": config.get("num_local_experts"), **config}  # transformers 5 writes num_local_experts
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if config.get(key) is None:
                raise ValueError(f"config.json: {key} is missing")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError("config.json: mlp_only_layers, decoder_sparse_step: dense layers among them not supported")
        experts = ExpertsConfig(
            count=config["num_experts"],
            active=config["num_experts_per_tok"],
            intermediate_size=config["moe_intermediate_size"],
            normalize=bool(config.get("norm_topk_prob", False)),
        )
        return replace(super().read_config(config), experts=experts)

    def make_layer(self, index: int) -> DecoderLayer:
        assert self.config.experts is not None
        return DecoderLayer(self.config, index, MixtureOfExperts(self.config.hidden_size, self.config.experts))
