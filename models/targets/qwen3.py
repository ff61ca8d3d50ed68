"""Qwen3 (Qwen3ForCausalLM): Llama with queries and keys normed per head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.config import TargetConfig
from models.targets.llama import LlamaTarget
from models.targets.qwen2 import qwen_windows


class Qwen3Target(LlamaTarget):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        base = super().read_config(config)
        # The head size does not follow from other sizes; transformers' default is 128.
        head_dim = config.get("head_dim") or 128
        return replace(base, qk_norm=True, head_dim=head_dim, windows=qwen_windows(config, base.num_layers))
