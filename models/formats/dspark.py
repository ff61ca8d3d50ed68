"""Shared by the formats of DSpark: its Markov head and its confidence head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.fields import MOST, Fields
from models.heads.config import HeadShape
from models.heads.dflash.config import DFlashConfig
from models.heads.dspark.config import KEYS, DSparkConfig

TRAINING = (  # keys that only its training reads
    "num_anchors",
    "ce_loss_alpha",
    "l1_loss_alpha",
    "confidence_head_alpha",
    "loss_decay_gamma",
)


def read_markov(fields: Fields) -> dict[str, Any]:
    """Read KEYS. A key of a part that the head does not have may be absent, any other not: readers' defaults differ."""
    fields.ignore(*TRAINING)
    rank, confident = fields.need("markov_rank", int), fields.need("enable_confidence_head", bool)
    kind, with_markov = fields.maybe("markov_head_type", str), fields.maybe("confidence_head_with_markov", bool)
    if not 0 <= rank <= MOST:
        raise ValueError(f"{fields.name}: markov_rank={rank}: must be 0 to {MOST}")
    if rank and kind is None:
        raise ValueError(f"{fields.name}: markov_head_type is missing, though markov_rank={rank}")
    if confident and with_markov is None:
        raise ValueError(f"{fields.name}: confidence_head_with_markov is missing, though enable_confidence_head=True")
    return dict(zip(KEYS, (rank, kind or "vanilla", confident, bool(with_markov)), strict=True))


def make_shape(shape: Mapping[str, Any], markov: Mapping[str, Any], notes: list[str]) -> DFlashConfig:
    """Return the head's shape: DFlash's if there is no Markov head. Raises ValueError for a confidence head alone."""
    if markov["markov_rank"]:
        return DSparkConfig(**shape, **markov)
    if markov["enable_confidence_head"]:
        raise ValueError("config.json: markov_rank=0, enable_confidence_head=True: no head has only the latter")
    notes.append("markov_rank is 0: a DFlash head")
    return DFlashConfig(**shape)


def kind(fields: Mapping[str, Any]) -> str:
    """Return the kind of head that `make_shape` makes of these keys."""
    return "dspark" if fields.get("markov_rank") else "dflash"


def losses(config: HeadShape) -> list[str]:
    kind = getattr(config, "markov_head_type", "vanilla")
    return [] if kind == "vanilla" else [f"vLLM serves markov_head_type=vanilla only; this head is {kind}"]
