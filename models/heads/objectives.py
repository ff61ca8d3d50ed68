"""The keys of `objective=`: those that all training losses share, and those of the loss that trains several heads.

The keys of a loss that trains one head alone are in that head's config.py. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from models.checks import MISSING, check_fields, choice, number

LOSSES = ("kl", "ce", "label", "tv", "lk", "lk_hybrid")  # train/objectives/losses.py


@dataclass
class ObjectiveConfig:
    """Keys of every objective. The loss of step k, the k-th drafted token, has the weight step_weight ** k."""

    name: str = MISSING
    steps: int | None = number(None, low=1)  # K: tokens drafted from each slot; null: as many as the head supports
    step_weight: float = number(1.0, above=0, high=1)
    # token: mean over all slots | sequence: mean over sequences of each one's mean
    reduction: str = choice("token", "token", "sequence")
    # true: logits, probabilities and their gradients are materialised for one chunk of slots at a time | false: for all
    # slots, chunked if there are many | null: on a GPU like true, on a CPU one kernel for LM head and loss
    # (kernels/vocabulary.py) if the loss is kl, ce or label; only if the head's parameters are not sharded
    fused: bool | None = None
    checkpointing: bool = False  # activation checkpointing: recompute those of the head's MLPs in backward

    loss: ClassVar[str] = "kl"  # of the logits; one of LOSSES
    feature_noise: ClassVar[float] = 0.0  # a: noise U(-a, a) is added to the features in training
    drop_out_of_vocab: ClassVar[bool] = False  # no loss where the target's argmax is outside the draft vocabulary
    sampled: ClassVar[bool] = False  # a depth is trained on a sample of the slots of the depth before: `slot_share`

    def __post_init__(self) -> None:
        check_fields(self, "objective.")

    def slot_share(self, depth: int) -> float:
        """Return the share of the slots that this depth is trained on."""
        return 1.0


@dataclass
class BlockObjectiveConfig(ObjectiveConfig):
    """Losses of all depths of blocks that start at random slots of the responses (DFlash, arXiv 2602.06036).

    With step_weight = exp(-1/γ) the weights of a block decay as in the paper, whose γ is 7, 5 and 4 for blocks of 16,
    10 and 8.
    """

    step_weight: float = number(0.8, above=0, high=1)
    loss: str = choice("kl", *LOSSES)  # as for ttt; label: the paper's
    drop_out_of_vocab: bool = True
    num_anchors: int = number(512, low=1)  # blocks per sequence, at most
    # decay: step_weight | dpace: by how likely the draft is to get that far and further (arXiv 2605.18810)
    weighting: str = choice("decay", "decay", "dpace")


@dataclass
class TttConfig(ObjectiveConfig):
    """Training-time test (EAGLE-3, arXiv 2503.01840): the head runs K steps on its own states, as in serving.

    Only tokens are teacher-forced; every step is compared with the target's distribution at the same position.
    """

    steps: int | None = number(3, low=1)
    step_weight: float = number(0.8, above=0, high=1)
    loss: str = choice("kl", *LOSSES)  # kl: target's distribution | ce: its argmax | label: the text
    drop_out_of_vocab: bool = True  # no loss where the target's argmax is outside the draft vocabulary

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None:
            raise ValueError("objective.steps=null: training-time test needs a number of steps")
