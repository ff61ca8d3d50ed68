"""The shape of Medusa heads, and their config.json in vLLM's layout, every key stated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.config import TargetConfig
from models.targets.llama import LAST


@dataclass(frozen=True)
class MedusaConfig:
    """`shared`: all heads read one copy of the target's LM head (`original_lm_head`), else each has its own."""

    vocab_size: int
    target_hidden_size: int
    num_heads: int
    num_layers: int
    draft_vocab_size: int
    shared: bool
    bias: bool

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"head.draft_vocab_size={self.draft_vocab_size}: must be 1 to the target's {self.vocab_size}"
            )

    @property
    def hidden_size(self) -> int:
        return self.target_hidden_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (LAST,)

    @property
    def max_depth(self) -> int:
        return self.num_heads

    @classmethod
    def for_target(
        cls,
        target: TargetConfig,
        *,
        num_heads: int = 4,
        num_layers: int = 1,
        draft_vocab_size: int | None = None,
        shared: bool = False,
        bias: bool = True,
    ) -> MedusaConfig:
        """`draft_vocab_size` None or too large means all of V."""
        size = min(draft_vocab_size or target.vocab_size, target.vocab_size)
        return cls(target.vocab_size, target.hidden_size, num_heads, num_layers, size, shared, bias)

    def to_json(self, *, verifier: str, verifier_architecture: str, speculative_tokens: int) -> dict[str, Any]:
        truncated = self.draft_vocab_size < self.vocab_size
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.target_hidden_size,
            "vocab_size": self.vocab_size,
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "truncated_vocab_size": self.draft_vocab_size if truncated else None,
            "original_lm_head": self.shared,
            "medusa_fc_bias": self.bias,
            "logit_scale": 1.0,
            "max_paths": 64,
            "topk": 10,
            "num_lookahead_tokens": speculative_tokens,
            "verifier": {"name_or_path": verifier, "architectures": [verifier_architecture]},
        }
