"""A draft model: its shape, a smaller target; its config.json, that of a target with the keys of a head; options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.checks import choice, number
from models.config import LAST, TargetConfig
from models.heads.config import AttentionShape, Facts, HeadShape, NewHeadConfig
from models.heads.layer_config import layer_json
from models.heads.objectives import LOSSES, ObjectiveConfig

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
    mask_token: int | None = None  # of a parallel draft model, among its own ids; None: it drafts token by token
    embed_requires_grad: bool = False  # train the token embedding and the LM head too

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape.of(self.model)

    @property
    def projected_heads(self) -> tuple[int, int]:
        return self.model.projected_heads

    @property
    def donor_layers(self) -> range:
        return range(self.model.num_layers)

    @property
    def draft_vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    def to_json(self, facts: Facts) -> dict[str, Any]:
        return layer_json(self.model) | {
            "model_type": MODEL_TYPES[self.model.architecture],
            "architectures": [self.model.architecture],
            "tie_word_embeddings": self.model.tie_word_embeddings,
            "sliding_window": None,
            "embed_requires_grad": self.embed_requires_grad,
            "speculative_tokens": facts.speculative_tokens,
            "verifier": facts.verifier_json,
        }


@dataclass
class DistilConfig(ObjectiveConfig):
    """The divergence of the target's next token from the draft model's, at every token of the answers.

    Its own tokens change nothing that it computes, so one step trains all depths.
    """

    steps: int | None = number(1, low=1)
    loss: str = choice("kl", *LOSSES)  # as for ttt


@dataclass
class DraftModelOptions(NewHeadConfig):
    objectives: ClassVar = {"distil": DistilConfig}
    is_target: ClassVar = True
    output_layers: ClassVar = ("model.lm_head",)
    files: ClassVar = "The folder is a whole target, which any program that reads the family of its target serves."

    num_layers: int | None = number(None, low=1)  # the target's first layers; null: a quarter of them
    embed_requires_grad: bool = False  # train the token embedding and the LM head too

    def for_target(self, target: TargetConfig) -> DraftModelConfig:
        if target.architecture not in MODEL_TYPES or target.windows:
            raise ValueError(
                f"head={DraftModelConfig.name}: a draft model is made of the layers of a target of "
                f"{', '.join(MODEL_TYPES)} without sliding windows, and this one is {target.architecture}"
            )
        count = max(1, target.num_layers // 4) if self.num_layers is None else self.num_layers
        if count > target.num_layers:
            raise ValueError(f"head.num_layers={count}: the target has {target.num_layers} layers")
        model = replace(target, num_layers=count, mtp_modules=0)
        sizes = target.vocab_size, target.hidden_size
        return DraftModelConfig(model, *sizes, embed_requires_grad=self.embed_requires_grad)
