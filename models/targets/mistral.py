"""Mistral (MistralForCausalLM): Llama without biases; in its first release attention has a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.config import TargetConfig
from models.targets.llama import LlamaTarget


class MistralTarget(LlamaTarget):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        base = super().read_config(config)
        window = config.get("sliding_window", 4096)  # transformers' default; later releases write null
        windows = () if window is None else (int(window),) * base.num_layers
        return replace(base, attention_bias=False, output_bias=False, mlp_bias=False, windows=windows)
