"""Granite 3 (GraniteForCausalLM): Llama with four multipliers, of embedding, residual branches, scores and logits.

A branch is added to the residual stream times m. The stream is kept divided by m here, so that branches are added as in
Llama and its kernels serve Granite too: the embedding is divided by m, the eps of the stream's norms by m squared, and
heads read the stream times m. The numbers differ from transformers' by rounding alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.config import TargetConfig
from models.fields import Fields
from models.targets.llama import LlamaTarget


class GraniteTarget(LlamaTarget):
    @classmethod
    def read_config(cls, config: dict[str, Any]) -> TargetConfig:
        names = ("embedding", "residual", "attention")
        embedding, residual, attention = (Fields(config).positive(f"{name}_multiplier", 1.0) for name in names)
        return replace(
            super().read_config(config),
            embedding_scale=embedding / residual,
            stream_scale=residual,
            attention_scale=attention,
            logits_scaling=Fields(config).positive("logits_scaling", 1.0),
        )
