"""The schemas of `objective=`: the training losses of heads."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from models.bounds import check_fields, choice, number

LOSSES = ("kl", "ce", "label", "tv", "lk", "lk_hybrid")  # train/objectives/losses/functions.py


@dataclass
class ObjectiveConfig:
    """Keys of every objective. The loss of step k, the k-th drafted token, has the weight step_weight ** k."""

    name: str = MISSING
    steps: int | None = number(None, low=1)  # K: tokens drafted from each slot; null: as many as the head supports
    step_weight: float = number(1.0, above=0, high=1)
    # token: mean over all slots | sequence: mean over sequences of each one's mean
    reduction: str = choice("token", "token", "sequence")
    feature_noise: float = number(0.0, low=0)  # a: noise U(-a, a) is added to the features in training
    # true: logits, probabilities and their gradients are materialised for one chunk of slots at a time | false: for all
    # slots, chunked if there are many | null: on a GPU like true, on a CPU one kernel for LM head and loss
    # (kernels/vocabulary.py) if the loss is kl, ce or label; only if the head's parameters are not sharded
    fused: bool | None = None
    # activation checkpointing: recompute those of the head's MLPs in backward; with medusa-2 of the target's layers
    checkpointing: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "objective.")


@dataclass
class TttConfig(ObjectiveConfig):
    """Training-time test: recurrent heads on their own states."""

    steps: int | None = number(3, low=1)
    step_weight: float = number(0.8, above=0, high=1)
    loss: str = choice("kl", *LOSSES)  # kl: target's distribution | ce: its argmax | label: the text
    drop_out_of_vocab: bool = True  # no loss where the target's argmax is outside the draft vocabulary

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None:
            raise ValueError("objective.steps=null: training-time test needs a number of steps")


@dataclass
class EagleObjectiveConfig(ObjectiveConfig):
    """Regression on the target's next hidden state. More than one step: on the head's own predictions (HASS)."""

    steps: int | None = number(1, low=1)
    feature_noise: float = number(0.1, low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None:
            raise ValueError("objective.steps=null: an EAGLE head needs a number of steps; 1, or more for HASS")


@dataclass
class MedusaObjectiveConfig(ObjectiveConfig):
    """Medusa-1 (arXiv 2401.10774): the target is frozen."""

    step_weight: float = number(0.8, above=0, high=1)
    labels: str = choice("soft", "soft", "hard")  # soft: the target's distribution | hard: the text


@dataclass
class Medusa2ObjectiveConfig(MedusaObjectiveConfig):
    """Medusa-2: first the heads alone, then heads and target together. This makes a new target with other output.

    Loss of the second stage: KL(original target || adapted target) + heads_weight * the heads' loss.
    """

    heads_first: float = 0.5  # share of the run in which the target is frozen
    heads_weight: float = number(0.2, above=0)
    lora_rank: int = number(32, low=1)
    lora_on: list[str] = field(default_factory=lambda: ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.heads_first < 1:
            raise ValueError(f"objective.heads_first={self.heads_first}: is a share, must be 0 to below 1")
        if not self.lora_on:
            raise ValueError("objective.lora_on=[]: names no layer; objective=medusa trains the heads alone")


@dataclass
class MlpObjectiveConfig(ObjectiveConfig):
    """Cross-entropy with the text, summed over heads."""


@dataclass
class PEagleObjectiveConfig(ObjectiveConfig):
    """Losses at all depths of a parallel draft; depth d is trained on a share max(ratio ** d, min_ratio) of slots."""

    # with 1, deep depths, hard to predict, dominate at the expense of the first (LOG.md)
    step_weight: float = number(0.4, above=0, high=1)
    loss: str = choice("kl", *LOSSES)  # as for ttt
    drop_out_of_vocab: bool = True
    ratio: float = number(0.7, above=0, high=1)
    min_ratio: float = number(0.2, above=0, high=1)
