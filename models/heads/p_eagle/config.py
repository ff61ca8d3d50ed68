"""P-EAGLE: EAGLE-3's shape with a mask token and a number of depths (speculators' `peagle`); options; objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from models.checks import choice, number
from models.config import TargetConfig
from models.heads.config import Facts
from models.heads.eagle3.config import Eagle3Config, Eagle3Options
from models.heads.layer_config import check_mask_token
from models.heads.objectives import LOSSES, ObjectiveConfig


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """`num_depths` tokens are drafted in one forward; `mask_token_id` stands in for those not drafted yet.

    Here each row counts a window from its own position, and sees all rows of its slot.
    """

    name: ClassVar[str] = "p-eagle"
    algorithm: ClassVar[str] = "peagle"
    speculator: ClassVar[str] = "PEagleSpeculator"

    mask_token_id: int = 0
    num_depths: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mask_token(self.mask_token_id, self.vocab_size)
        if (window := min((size for size in self.layer.windows if size), default=self.num_depths)) < self.num_depths:
            raise ValueError(f"head.window={window}: must hold the rows of a slot, num_depths={self.num_depths}")

    @property
    def max_depth(self) -> int:
        return self.num_depths

    def to_json(self, facts: Facts) -> dict[str, Any]:
        return super().to_json(facts) | {"mask_token_id": self.mask_token_id, "num_depths": self.num_depths}


@dataclass
class PEagleObjectiveConfig(ObjectiveConfig):
    """Losses at all depths of a parallel draft (arXiv 2602.01469).

    Depth 0 is trained on every slot, depth d on a sample of the share max(ratio ** d, min_ratio), whose slots have a
    row at every shallower depth too. K depths then cost far less than K passes over the sequence.
    """

    sampled: ClassVar[bool] = True

    # with 1, deep depths, hard to predict, dominate at the expense of the first: τ 1.55 for 2.14
    step_weight: float = number(0.4, above=0, high=1)
    loss: str = choice("kl", *LOSSES)  # as for ttt
    drop_out_of_vocab: bool = True
    ratio: float = number(0.7, above=0, high=1)
    min_ratio: float = number(0.2, above=0, high=1)

    def slot_share(self, depth: int) -> float:
        return max(self.ratio**depth, self.min_ratio)


@dataclass
class PEagleOptions(Eagle3Options):
    objectives: ClassVar = {"p-eagle": PEagleObjectiveConfig}
    loose_parameters: ClassVar = ("mask_hidden",)
    files: ClassVar = "The files follow the `speculators` format (`peagle`), which vLLM reads as well."

    embed_requires_grad: bool | None = True
    num_depths: int = number(8, low=1)  # tokens drafted in one forward
    mask_token_id: int | None = None  # placeholder for tokens not known yet; null: the end-of-text token

    @property
    def max_depth(self) -> int:
        return self.num_depths

    def for_target(self, target: TargetConfig) -> PEagleConfig:
        """`mask_token_id` null: the end of text, which no slot that is drafted from holds."""
        mask = next(iter(target.eos_token_ids), 0) if self.mask_token_id is None else self.mask_token_id
        return PEagleConfig(**self.shape(target), mask_token_id=mask, num_depths=self.num_depths)

    def default_layers(self, target: TargetConfig) -> int:
        """Return the published number of layers, or 1 for targets so small that this would not be a small head."""
        return 4 if target.num_layers >= 24 else 1
