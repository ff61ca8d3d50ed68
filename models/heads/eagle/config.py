"""EAGLE-1: shape of a head and its config.json, a LlamaConfig of one layer plus EAGLE's keys; options; objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from models.checks import number
from models.config import LAST, TargetConfig
from models.heads.config import DecoderShape, Facts, NewHeadConfig
from models.heads.layer_config import head_layer, layer_json
from models.heads.objectives import ObjectiveConfig, TttConfig

ARCHITECTURE = "EagleLlamaForCausalLM"


@dataclass(frozen=True)
class EagleConfig(DecoderShape):
    """`bias`: of fc. `own_embedding`: the token embedding is stored with the head, not shared with the target."""

    name: ClassVar[str] = "eagle"
    aux_layers: ClassVar[tuple[int, ...]] = (LAST,)
    reads_lm_head: ClassVar[bool] = True

    layer: TargetConfig
    bias: bool
    own_embedding: bool

    @property
    def draft_vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def target_hidden_size(self) -> int:
        return self.layer.hidden_size

    def to_json(self, facts: Facts) -> dict[str, Any]:
        return layer_json(self.layer) | {
            "architectures": [ARCHITECTURE],
            "bias": self.bias,
            "own_embedding": self.own_embedding,
            "speculative_tokens": facts.speculative_tokens,
            "verifier": facts.verifier_json,
        }


@dataclass
class EagleObjectiveConfig(ObjectiveConfig):
    """Regression on the target's next hidden state. More than one step: on the head's own predictions (HASS)."""

    feature_noise: ClassVar[float] = 0.1

    steps: int | None = number(1, low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None:
            raise ValueError("objective.steps=null: an EAGLE head needs a number of steps; 1, or more for HASS")


@dataclass
class EagleOptions(NewHeadConfig):
    objectives: ClassVar = {"eagle": EagleObjectiveConfig, "ttt": TttConfig}
    files: ClassVar = "The tensors bear the names of SafeAILab's EAGLE-1 heads, which vLLM reads as well."

    bias: bool = False  # bias of fc; SafeAILab's heads for Llama 2 and Vicuna have one, vLLM reads none
    own_embedding: bool = True  # store the token embedding with the head; false: use the target's

    def for_target(self, target: TargetConfig) -> EagleConfig:
        return EagleConfig(head_layer(target, num_layers=1), self.bias, self.own_embedding)
