"""Acceptance of a head as it is stated: in its provenance, on its card, in metrics and for people."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from infer.request import SpeculationStats
from models.heads.measured_tree import RANK_ACCURACY


def tau(stats: SpeculationStats) -> float:
    """Return the acceptance length, nan without a verify: no response had a second token."""
    return stats.acceptance_length if stats.steps else math.nan


def stated(value: float, form: str = ".3f", unit: str = "") -> str:
    """Return a number for people: nan, a mean over nothing, is undefined."""
    return "undefined" if math.isnan(value) else f"{value:{form}}{unit}"


@dataclass(frozen=True)
class Acceptance:
    """Acceptance on the held-out prompts at one temperature, simulated by the trainer and measured in the engine."""

    simulated: SpeculationStats
    engine: SpeculationStats

    @property
    def gap(self) -> float:
        """Relative difference of the simulated acceptance length from the engine's; nan if one is undefined."""
        return tau(self.simulated) / tau(self.engine) - 1

    def summary(self) -> dict[str, Any]:
        """Return both acceptance lengths, None for one that is undefined."""
        both = (("simulated", self.simulated), ("engine", self.engine))
        return {name: round(tau(stats), 4) if stats.steps else None for name, stats in both}


@dataclass(frozen=True)
class Measured:
    greedy: Acceptance
    sampled: Acceptance  # at temperature 1
    rank_accuracy: list[list[float]]  # by depth and rank: how often the target's token had this rank in the draft
    held_out_prompts: int
    coverage: float  # share of the tokens of the held-out greedy responses that the draft vocabulary holds

    def record(self) -> dict[str, Any]:
        counted = {"greedy": self.greedy.engine, "temperature 1": self.sampled.engine}
        return {
            "held_out_prompts": self.held_out_prompts,
            "coverage": round(self.coverage, 4),
            "counted": {name: asdict(stats) for name, stats in counted.items()},
            "acceptance_length": self.greedy.summary(),
            "acceptance_length_sampled": self.sampled.summary(),
            RANK_ACCURACY: self.rank_accuracy,
        }
