"""The schemas of conf/tracker: where metrics go in addition to the run's own files."""

from __future__ import annotations

from dataclasses import dataclass

from models.checks import MISSING, check_fields, choice, number


@dataclass
class TrackerConfig:
    name: str = MISSING


@dataclass
class ProjectConfig(TrackerConfig):
    project: str = "headway"


@dataclass
class MlflowConfig(ProjectConfig):
    """`project` is the name of an experiment."""


@dataclass
class WandbConfig(ProjectConfig):
    entity: str | None = None
    mode: str = choice("auto", "auto", "online", "offline")  # auto: online with credentials, else offline
    # number of held-out texts sent as a table, accepted drafts marked; they may be private
    samples: int = number(0, low=0)
    upload: bool = False  # send the exported head as an artifact

    def __post_init__(self) -> None:
        check_fields(self, "tracker.")


TRACKERS = {
    "wandb": WandbConfig,
    "mlflow": MlflowConfig,
    "trackio": ProjectConfig,
    "tensorboard": TrackerConfig,
    "none": TrackerConfig,
}
