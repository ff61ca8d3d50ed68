"""Medusa: the shape of the heads and their config.json in vLLM's layout; options; objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from models.checks import choice, number
from models.config import LAST, TargetConfig
from models.heads.config import Facts, HeadShape, NewHeadConfig
from models.heads.layer_config import check_draft_vocabulary, draft_vocabulary
from models.heads.objectives import ObjectiveConfig


@dataclass(frozen=True)
class MedusaConfig(HeadShape):
    """`shared`: all heads read one copy of the target's LM head (`original_lm_head`), else each has its own."""

    name: ClassVar[str] = "medusa"
    aux_layers: ClassVar[tuple[int, ...]] = (LAST,)

    vocab_size: int
    target_hidden_size: int
    num_heads: int
    num_layers: int
    draft_vocab_size: int
    shared: bool
    bias: bool

    def __post_init__(self) -> None:
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)

    @property
    def reads_lm_head(self) -> bool:
        return self.shared

    @property
    def hidden_size(self) -> int:
        return self.target_hidden_size

    @property
    def max_depth(self) -> int:
        return self.num_heads

    def to_json(self, facts: Facts) -> dict[str, Any]:
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
            "num_lookahead_tokens": facts.speculative_tokens,
            "verifier": facts.verifier_json,
        }


@dataclass
class MedusaObjectiveConfig(ObjectiveConfig):
    """Medusa-1 (arXiv 2401.10774): the target is frozen, and each head is compared with it at the head's depth."""

    step_weight: float = number(0.8, above=0, high=1)
    labels: str = choice("soft", "soft", "hard")  # soft: the target's distribution | hard: the text

    @property
    def loss(self) -> str:
        return "label" if self.labels == "hard" else "kl"

    @property
    def drop_out_of_vocab(self) -> bool:
        return self.labels == "soft"


@dataclass
class MedusaOptions(NewHeadConfig):
    objectives: ClassVar = {"medusa": MedusaObjectiveConfig}
    separate_depths: ClassVar = True
    files: ClassVar = "The files follow vLLM's layout of Medusa heads."

    num_heads: int = number(4, low=1)
    num_layers: int = number(1, low=1)  # residual layers of each head
    # at most this many draft tokens; null or more than the target has: all of them
    draft_vocab_size: int | None = number(None, low=1)
    shared: bool = False  # all heads read one frozen copy of the target's LM head; false: each trains its own
    bias: bool = True  # of the residual layers

    @property
    def max_depth(self) -> int:
        return self.num_heads

    def for_target(self, target: TargetConfig) -> MedusaConfig:
        return MedusaConfig(
            target.vocab_size,
            target.hidden_size,
            self.num_heads,
            self.num_layers,
            draft_vocabulary(self.draft_vocab_size, target),
            self.shared,
            self.bias,
        )
