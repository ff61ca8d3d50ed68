"""The shape of an EAGLE-1 head, and its config.json: a LlamaConfig of one layer plus EAGLE's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.config import TargetConfig
from models.heads.layer_config import head_layer, layer_json
from models.targets.llama import LAST

ARCHITECTURE = "EagleLlamaForCausalLM"


@dataclass(frozen=True)
class EagleConfig:
    """`bias`: of fc. `own_embedding`: the token embedding is stored with the head, not shared with the target."""

    layer: TargetConfig
    bias: bool
    own_embedding: bool

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def target_hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (LAST,)

    @property
    def max_depth(self) -> int | None:
        return None

    @classmethod
    def for_target(cls, target: TargetConfig, *, bias: bool = False, own_embedding: bool = True) -> EagleConfig:
        return cls(head_layer(target, num_layers=1), bias, own_embedding)

    def to_json(self, *, verifier: str, verifier_architecture: str, speculative_tokens: int) -> dict[str, Any]:
        return layer_json(self.layer) | {
            "architectures": [ARCHITECTURE],
            "bias": self.bias,
            "own_embedding": self.own_embedding,
            "speculative_tokens": speculative_tokens,
            "verifier": {"name_or_path": verifier, "architectures": [verifier_architecture]},
        }
