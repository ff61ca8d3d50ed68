"""A draft model: the shape of a smaller target, and its config.json, that of a target with the keys of a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config import LAST, TargetConfig
from models.heads.config import HeadShape
from models.heads.layer_config import layer_json

MODEL_TYPES = {  # families whose config.json Llama's keys can state
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class DraftModelConfig(HeadShape):
    """`model`: the smaller target. It reads no features: what `aux_layers` names is dropped."""

    name: ClassVar[str] = "draft-model"
    aux_layers: ClassVar[tuple[int, ...]] = (LAST,)

    model: TargetConfig
    vocab_size: int  # of the target that it drafts for
    target_hidden_size: int
    mask_token: int | None = (
        None  # id of a parallel draft model's mask token among its own; None: one token per forward
    )

    @property
    def draft_vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    def to_json(self, *, verifier: str, verifier_architecture: str, speculative_tokens: int) -> dict[str, Any]:
        return layer_json(self.model) | {
            "model_type": MODEL_TYPES[self.model.architecture],
            "architectures": [self.model.architecture],
            "tie_word_embeddings": self.model.tie_word_embeddings,
            "speculative_tokens": speculative_tokens,
            "verifier": {"name_or_path": verifier, "architectures": [verifier_architecture]},
        }
