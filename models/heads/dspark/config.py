"""DSpark: DFlash's shape with a Markov head and a confidence head; options; objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from models.checks import choice, number, one_of
from models.heads.dflash.config import MAX_BLOCK, DFlashConfig, DFlashOptions
from models.heads.objectives import LOSSES, BlockObjectiveConfig

MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    name: ClassVar[str] = "dspark"
    algorithm: ClassVar[str] = "dspark"
    speculator: ClassVar[str] = "DSparkSpeculator"

    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True  # the confidence head reads the embedding of the token before as well

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("head.markov_head_type", self.markov_head_type, MARKOV_KINDS)


@dataclass
class DSparkObjectiveConfig(BlockObjectiveConfig):
    """A mixture of `loss` and the text's cross-entropy, and the confidence head's loss (arXiv 2607.05147).

    The confidence head learns the probability Σ min(p, q) with which a token is accepted.
    """

    loss: str = choice("tv", *LOSSES)
    label_weight: float = number(0.1, low=0, high=1)  # share of the text's cross-entropy
    confidence_weight: float = number(1.0, low=0)


@dataclass
class DSparkOptions(DFlashOptions):
    shape_type: ClassVar = DSparkConfig
    objectives: ClassVar = {"dspark": DSparkObjectiveConfig}
    output_layers: ClassVar = ("lm_head", "markov_head.markov_w2")
    files: ClassVar = "The files follow the `speculators` format (`dspark`), which vLLM reads as well."

    block_size: int = number(7, low=2, high=MAX_BLOCK)
    sample_from_anchor: bool = True
    markov_rank: int = number(256, low=1)
    # vanilla | gated: by the row's state | rnn: with a state that goes through the block
    markov_head_type: str = choice("vanilla", *MARKOV_KINDS)
    enable_confidence_head: bool = True  # predicts whether a token will be accepted, which ends drafts early
    confidence_head_with_markov: bool = True
