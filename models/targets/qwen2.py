"""Qwen2 and Qwen2.5 (Qwen2ForCausalLM): Llama with biases on the QKV projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.config import TargetConfig
from models.targets.llama import LlamaTarget


class Qwen2Target(LlamaTarget):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        base = super().read_config(config)
        windows = qwen_windows(config, base.num_layers)
        return replace(base, attention_bias=True, output_bias=False, mlp_bias=False, windows=windows)


def qwen_windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return Qwen's windows: none unless `use_sliding_window`, then by `layer_types` or from `max_window_layers` on."""
    if not config.get("use_sliding_window", False):
        return ()
    window = int(config.get("sliding_window") or 4096)
    types = config.get("layer_types") or None
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return typed_windows(types, window, num_layers)


def typed_windows(types: list[str], window: int, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window by `layer_types`. Raises ValueError unless it lists full or sliding for each layer."""
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != num_layers:
        raise ValueError(f"config.json: layer_types={types}: must name full or sliding attention for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
