"""minutes= as a limit of answers and features: together they take at most half of it, so a slow machine makes fewer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from infer.engine import Engine
from train.config import OfflineFeaturesConfig, TrainConfig
from train.data.sequences import Batch
from train.features.online import compute_features, fits_cache
from train.preparation.models import processes, shapes
from train.threads import work_threads

SHARE = 0.5  # of minutes=; the other half is for updates and evaluations

T = TypeVar("T")


@dataclass
class TimeLimit:
    """Decides how many conversations there is time for."""

    seconds: float  # from `started` until answers and features must be done
    started: float
    each: float = 0.0  # seconds that the features of one conversation will take
    least: int = 1  # conversations that are made however long they take
    clock: Callable[[], float] = time.perf_counter
    reached: bool = False  # whether answering ended early

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def _spent(self) -> float:
        return self.clock() - self.started

    def over(self, answered: int) -> bool:
        """Return whether answering must end, with `answered` conversations that have at least a part of an answer."""
        self.reached = answered >= self.least and self._spent + answered * self.each >= self.seconds
        return self.reached

    def about(self, answered: float) -> int:
        """Estimate the number of conversations there is time for, from the first `answered` ones, at least one."""
        pace = (self.clock() - self._began) / answered + self.each
        return max(self.least, int((self.seconds - (self._began - self.started)) / pace))

    def affordable(self, count: int) -> int:
        """Return of how many of `count` conversations that need no answer the features can be computed."""
        if not self.each:
            return count
        return min(count, max(self.least, int((self.seconds - self._spent) / self.each)))


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return `count` of the items, evenly spaced, since data may be ordered by file."""
    return [items[place * len(items) // count] for place in range(count)]


def time_limit(config: TrainConfig, engine: Engine, started: float, *, recording: bool = False) -> TimeLimit | None:
    """Return the limit of a run that was started at `started`; None if it has none.

    Computes some features to measure how long they take, unless they are recorded while the engine answers.
    """
    if config.minutes is None or config.stage != "all":
        return None
    each = 0.0 if recording or config.features.target == "sharded" else feature_seconds(config, engine)
    if not isinstance(config.features, OfflineFeaturesConfig):
        each *= processes()  # each of them computes those of all
    return TimeLimit(60 * SHARE * config.minutes, started, each, least=config.batch_size * config.accumulate)


def feature_seconds(config: TrainConfig, engine: Engine) -> float:
    """Return the seconds of one conversation's features, 0 if they are not computed before the first update."""
    layers = shapes(config).head.config.aux_layers
    tokens = config.data.num_sequences * config.sequence_length
    target = engine.target
    if not isinstance(config.features, OfflineFeaturesConfig) and not fits_cache(
        config.features, target, layers, tokens
    ):
        return 0.0
    on_gpu = engine.device.type == "cuda"
    rows = config.batch_size if on_gpu else 1  # on a CPU a single row takes its share of a batch
    ids = torch.ones(rows, min(config.sequence_length, engine.context), dtype=torch.int64)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), tuple(range(rows))).to(engine.device)

    def work() -> None:
        compute_features(target, batch, layers)
        if on_gpu:
            torch.cuda.synchronize(engine.device)

    work()  # warm-up
    threads = work_threads(config, engine.device, processes(), lambda text: None)  # no work follows, so nothing is said
    return threads.look(work) / rows
