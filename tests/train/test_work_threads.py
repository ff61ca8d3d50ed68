"""The number of threads of updates and features, by a clock of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infer.engine import Engine
from infer.options.cli import compose
from tests.train.running import assert_equal, run, tensors
from train.config import TrainConfig
from train.data.sequences import Sequences
from train.features.layout import Layout
from train.features.online import compute_features
from train.features.store import CachedFeatures
from train.preparation import threads as module
from train.preparation.threads import (
    FIRST_S,
    LONGEST_S,
    LOOKS,
    LOOKS_SHARE,
    SELDOM_S,
    SLOW_WORKS,
    WorkThreads,
    work_threads,
)


class Machine:
    """A work takes `one` seconds with one thread and `two` with two."""

    def __init__(self, one: float, two: float) -> None:
        self.one, self.two, self.now, self.works = one, two, 0.0, 0

    def clock(self) -> float:
        return self.now

    def work(self) -> int:
        self.now += self.two if torch.get_num_threads() == 2 else self.one
        self.works += 1
        return self.works


@pytest.fixture(autouse=True)
def spoken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(module, "say", lines.append)
    return lines


@pytest.mark.parametrize(("one", "two", "count"), [(1.0, 0.6, 2), (1.0, 9.0, 1), (1.0, 1.2, 2), (1.0, 1.3, 1)])
def test_the_clearly_faster_number_is_taken(one: float, two: float, count: int, spoken: list[str]) -> None:
    machine = Machine(one, two)
    threads = WorkThreads(2, clock=machine.clock)
    assert threads.look(machine.work) == pytest.approx(two if count == 2 else one)
    assert (threads.count, machine.works) == (count, 2 * LOOKS)
    changed = "1 CPU thread is faster now than 2; sums may round differently from here"
    assert spoken == ([changed] if count == 1 else [])


def test_it_looks_early_once_and_then_when_works_are_slow_or_after_long() -> None:
    machine = Machine(1.0, 0.5)
    threads = WorkThreads(2, clock=machine.clock)

    def works_until_due(pace: Callable[[], float]) -> float:
        seconds = 0.0
        while not threads.due:
            threads.record(1.0, pace())
            seconds += pace()
        return seconds

    assert works_until_due(lambda: 0.5) == FIRST_S
    threads.look(machine.work)
    looked = 2 * LOOKS * (machine.one + machine.two) / 2
    assert works_until_due(lambda: 0.5) == pytest.approx(max(SELDOM_S, looked / LOOKS_SHARE))
    machine.two = 9.0  # another process has begun to compute
    threads.look(machine.work)
    assert threads.count == 1
    after_look = LOOKS * (machine.one + machine.two) / LOOKS_SHARE
    threads.record(1.0, 0.5)
    assert works_until_due(lambda: 5.0) <= after_look + 5.0 * SLOW_WORKS
    machine.two = 0.5  # it has ended
    threads.look(machine.work)
    assert threads.count == 2


def test_looks_become_seldom_and_take_little_time() -> None:
    machine = Machine(1.0, 0.5)
    threads = WorkThreads(2, clock=machine.clock)
    looks, looking = 0, 0.0
    while machine.now < 20_000:
        if threads.due:
            begin, looks = machine.now, looks + 1
            threads.look(machine.work)
            looking += machine.now - begin
        begin = machine.now
        machine.now += 0.5
        threads.record(1.0, machine.now - begin)
    assert looking / machine.now < LOOKS_SHARE
    assert looks >= 20_000 / (LONGEST_S + 10)


def test_works_of_other_sizes_are_not_slow() -> None:
    threads = WorkThreads(2)
    threads.look(lambda: None)
    for size in (1.0, 50.0, 3.0, 80.0) * 3:
        threads.record(size, size * 0.01)
    assert not threads.due


def test_threads_that_are_configured_stay(settings: list[str]) -> None:
    config = compose("train", TrainConfig, [*settings, "engine.threads=3"])
    threads = work_threads(config, torch.device("cpu"))
    machine = Machine(1.0, 9.0)
    for _ in range(1000):
        threads.record(1.0, 10.0)
    assert not threads.due
    threads.look(machine.work)
    assert threads.count == 3
    config = compose("train", TrainConfig, [*settings, "engine.threads=null"])
    several = work_threads(config, torch.device("cpu"), processes=2)
    several.record(1.0, 10_000.0)
    assert (several.count, several.due) == (torch.get_num_threads(), False)


def test_features_are_computed_with_the_faster_number(
    engine: Engine, responses: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is busy, as told by a clock that two threads turn faster, so later batches use one thread."""
    now, counts = [0.0], list[int]()

    def computed(*inputs: object) -> object:
        counts.append(torch.get_num_threads())
        now[0] += 10.0 if counts[-1] == 2 else 1.0
        return compute_features(*inputs)  # type: ignore[arg-type]

    monkeypatch.setattr("train.features.store.compute_features", computed)
    monkeypatch.setattr("train.features.store.LEAST_SHARDS", 1)
    threads, aux = WorkThreads(2, clock=lambda: now[0]), [1, 2, 3]
    cached = CachedFeatures(tmp_path / "unused", engine.target, aux, responses, Layout.of(engine.target, aux))
    cached.fill(2, (0, 1), lambda: None, show=False, threads=threads)
    assert counts[0] == 2
    assert counts[-1] == 1
    assert len(counts) == 3 + 2 * LOOKS
    batch = responses.batch(range(2))
    expected = compute_features(engine.target, batch, aux)
    served = batch.assistant
    for value, reference in zip(cached(batch).aux, expected.aux, strict=True):
        assert torch.allclose(value[served], reference[served], atol=1e-4)


class Looking(WorkThreads):
    """Looks before every update, and never finds another number faster."""

    looks = 0

    def __init__(self, looking: bool) -> None:
        super().__init__(2, clock=lambda: 0.0)
        self._looking = looking

    @property
    def due(self) -> bool:
        return self._looking

    def look(self, run: Callable[[], object]) -> float:
        Looking.looks += 1
        return super().look(run)


def test_looks_change_no_update(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = []
    for name, looking in (("still", False), ("looking", True)):
        monkeypatch.setattr("train.loop.work_threads", lambda *_, looking=looking: Looking(looking))
        run(settings, f"run={name}", "steps=3", f"output_dir={tmp_path / name}")
        heads.append(tensors(tmp_path / name))
    assert Looking.looks == 3
    assert_equal(*heads)
