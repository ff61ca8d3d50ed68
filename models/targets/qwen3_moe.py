"""Qwen3-MoE (Qwen3MoeForCausalLM): Qwen3 with a mixture of experts in place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.config import ExpertsConfig, TargetConfig
from models.targets.qwen3 import Qwen3Target


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
