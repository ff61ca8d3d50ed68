"""The schemas of conf/tracker: where metrics go in addition to the run's own files."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from infer.config_checks import at_least, one_of


@dataclass
class TrackerConfig:
    name: str = MISSING


@dataclass
class WandbConfig(TrackerConfig):
    project: str = "headway"
    entity: str | None = None
    mode: str = "auto"  # auto: online with credentials, else offline | online | offline
    samples: int = 0  # number of held-out texts sent as a table, accepted drafts marked; they may be private
    upload: bool = False  # send the exported head as an artifact

    def __post_init__(self) -> None:
        one_of("tracker.mode", self.mode, ("auto", "online", "offline"))
        at_least("tracker.samples", self.samples, 0)


TRACKERS = {"wandb": WandbConfig, "tensorboard": TrackerConfig, "none": TrackerConfig}
