"""The schema of scripts/chaos.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from infer.batch.params import MAX_SEED
from infer.config import ModelConfig, register
from models.checks import check_fields, number


@dataclass
class ChaosConfig:
    model: ModelConfig = MISSING
    minutes: float = number(10.0, above=0)  # no fault begins after them
    rounds: int | None = number(None, low=1)  # so many of each fault, however long they take; null: what `minutes` hold
    seed: int = number(0, low=0, high=MAX_SEED)  # of the order of faults, their moments, and what is damaged
    faults: list[str] = field(default_factory=list)  # names that begin so, as 'server' or 'training: kill'; empty: all
    clients: int = number(4, low=1)  # requests in flight when a fault comes
    output_dir: str = "outputs"

    def __post_init__(self) -> None:
        check_fields(self)


COMMANDS: dict[str, type] = {"chaos": ChaosConfig}
register({}, COMMANDS)
