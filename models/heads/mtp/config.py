"""MTP modules: their shape, config.json in speculators' form, options, objective.

Families disagree on the FLAGS, and a wrong one costs accepted tokens alone, so that each is written out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.checks import choice, number
from models.config import LAST, UNNORMED, TargetConfig
from models.heads.config import DecoderShape, Facts, NewHeadConfig
from models.heads.layer_config import (
    QWEN3,
    family_json,
    further_layer,
    has_own_layers,
    head_layer,
    layer_json,
    speculators_json,
)
from models.heads.objectives import LOSSES, ObjectiveConfig, TttConfig
from models.mtp_names import Layout, layout_of

FLAGS = ("hidden_first", "pre_norm", "norm_recycled", "zero_first")


@dataclass(frozen=True)
class MtpConfig(DecoderShape):
    """`layer`: of a module; its num_layers counts the modules, of which depth k uses the one at k modulo their number.

    `layer.centered_norms`: all norms of a module store their scale less one.
    """

    name: ClassVar[str] = "mtp"
    algorithm: ClassVar[str] = "mtp"
    speculator: ClassVar[str] = "MTPDraftModel"

    layer: TargetConfig
    hidden_first: bool = False
    pre_norm: bool = False
    norm_recycled: bool = True
    zero_first: bool = True

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (UNNORMED if self.pre_norm else LAST,)

    @property
    def draft_vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def target_hidden_size(self) -> int:
        return self.layer.hidden_size

    def to_json(self, facts: Facts) -> dict[str, Any]:
        """Return speculators' config.json with the flags, which speculators itself has as in its own modules.

        It cannot set `draft_vocab_size`, the target's whole vocabulary.
        """
        kind = {"model_type": "qwen3", "architectures": [QWEN3]} if self.layer.qk_norm else {}
        layer = family_json(self.layer) if has_own_layers(self.layer) else layer_json(self.layer) | kind
        shared = speculators_json(self, layer, facts)
        del shared["draft_vocab_size"]
        return shared | {
            "num_nextn_predict_layers": self.layer.num_layers,
            **{flag: getattr(self, flag) for flag in FLAGS},
            "centered_norms": self.layer.centered_norms,
        }


@dataclass
class MtpObjectiveConfig(ObjectiveConfig):
    """K steps through the modules, each over the states of the step before it (FastMTP, arXiv 2509.18362).

    In every step a slot has the same position, and attends to that step's rows of the slots up to its own. The weights
    of the steps, step_weight ** k, are divided by their sum.
    """

    steps: int | None = number(3, low=1)
    step_weight: float = number(0.6, above=0, high=1)
    loss: str = choice("label", *LOSSES)  # as for ttt

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None:
            raise ValueError("objective.steps=null: MTP modules need a number of steps")


@dataclass
class MtpOptions(NewHeadConfig):
    """Modules that the target ships are trained further."""

    objectives: ClassVar = {"mtp": MtpObjectiveConfig, "ttt": TttConfig}
    files: ClassVar = "The files follow the `speculators` layout of MTP modules."

    num_modules: int | None = number(None, low=1)  # null for these three: as the target's own modules have it,
    hidden_first: bool | None = None  # the projection reads the hidden state before the token; otherwise false
    centered_norms: bool | None = None  # norms store their scale less one; otherwise as the target's norms
    pre_norm: bool = False  # read the target's hidden state from before its final norm
    norm_recycled: bool = True  # a step reads the state of the step before after the module's last norm
    zero_first: bool | None = (
        None  # zeros in place of the token's embedding at position 0; null: as shipped, else false
    )

    def for_target(self, target: TargetConfig) -> MtpConfig:
        count = self.num_modules or target.mtp_modules or 1
        layer = further_layer(target, count) if has_own_layers(target) else head_layer(target, num_layers=count)
        layer = replace(
            layer,
            attention_bias=target.attention_bias,
            qk_norm=target.qk_norm,
            centered_norms=target.centered_norms if self.centered_norms is None else self.centered_norms,
        )
        shipped = layout_of(target.architecture) if target.mtp_modules else Layout("", zero_first=False)
        hidden_first = shipped.hidden_first if self.hidden_first is None else self.hidden_first
        zero_first = shipped.zero_first if self.zero_first is None else self.zero_first
        return MtpConfig(layer, hidden_first, self.pre_norm, self.norm_recycled, zero_first)
