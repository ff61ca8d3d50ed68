"""DFlash2: DFlash's shape with convolutions inside the block and a candidate selector; options; objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from models.checks import number
from models.heads.config import Facts
from models.heads.dflash.config import DFlashConfig, DFlashOptions
from models.heads.objectives import BlockObjectiveConfig

ARCHITECTURE = "DFlash2DraftModel"
TAPS = 2  # of a convolution: the row itself and the one before it


@dataclass(frozen=True)
class DFlash2Config(DFlashConfig):
    name: ClassVar[str] = "dflash2"
    algorithm: ClassVar[str] = "dflash2"
    speculator: ClassVar[str] = ARCHITECTURE

    conv_group_size: int = 16  # channels that share the part of a kernel that depends on the row
    selector_rank: int = 256
    selector_top_k: int = 16  # candidates per row

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer.hidden_size % self.conv_group_size:
            raise ValueError(
                f"head.conv_group_size={self.conv_group_size}: must divide the hidden size, {self.layer.hidden_size}"
            )
        if not 1 <= self.selector_top_k <= self.draft_vocab_size:
            raise ValueError(f"head.selector_top_k={self.selector_top_k}: must be 1 to {self.draft_vocab_size}")

    def to_json(self, facts: Facts) -> dict[str, Any]:
        """Return z-lab's config.json, every flag written out, with the target's name beside it."""
        return self.flat_json(ARCHITECTURE) | {
            "verifier": facts.verifier_json,
            "speculative_tokens": facts.speculative_tokens,
        }

    def further_json(self) -> dict[str, Any]:
        return {"conv_kernel_size": TAPS} | super().further_json()


@dataclass
class DFlash2ObjectiveConfig(BlockObjectiveConfig):
    """The loss of the LM head's logits, and the selector's cross-entropy over its candidates."""

    selector_weight: float = number(1.0, low=0)


@dataclass
class DFlash2Options(DFlashOptions):
    shape_type: ClassVar = DFlash2Config
    objectives: ClassVar = {"dflash2": DFlash2ObjectiveConfig}
    loose_parameters: ClassVar = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
    files: ClassVar = "The files follow z-lab's format of DFlash2, which vLLM reads as well."

    conv_group_size: int = number(16, low=1)
    selector_rank: int = number(256, low=1)
    selector_top_k: int = number(16, low=1)
