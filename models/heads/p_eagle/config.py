"""The shape of a P-EAGLE head: EAGLE-3's, with a mask token and a number of depths (speculators' `peagle`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from models.config import TargetConfig
from models.heads.eagle3.config import Eagle3Config


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """`num_depths` tokens are drafted in one forward; `mask_token_id` stands in for those not drafted yet."""

    algorithm: ClassVar[str] = "peagle"
    speculator: ClassVar[str] = "PEagleSpeculator"

    mask_token_id: int = 0
    num_depths: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_token_id < self.layer.vocab_size:
            raise ValueError(
                f"head.mask_token_id={self.mask_token_id}: must be a token of the target's {self.layer.vocab_size}"
            )

    @classmethod
    def default_layers(cls, target: TargetConfig) -> int:
        """Return the published number of layers, or 1 for targets so small that this would not be a small head."""
        return 4 if target.num_layers >= 24 else 1

    @property
    def max_depth(self) -> int:
        return self.num_depths

    @classmethod
    def for_target(cls, target: TargetConfig, *, mask_token_id: int | None = None, **options: Any) -> Self:
        """`mask_token_id` None: the end of text, which no slot that is drafted from holds. The embedding is trained."""
        if mask_token_id is None:
            mask_token_id = next(iter(target.eos_token_ids), 0)
        defaults: dict[str, Any] = {"mask_token_id": mask_token_id, "embed_requires_grad": True}
        return super().for_target(target, **defaults | options)

    def to_json(self, **facts: Any) -> dict[str, Any]:
        return super().to_json(**facts) | {"mask_token_id": self.mask_token_id, "num_depths": self.num_depths}
