"""The number of threads of updates and features, by a clock of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer.engine import Engine
from infer.options.cli import compose
from tests.train.running import assert_equal, run, tensors
from train import threads as module
from train.config import TrainConfig
from train.data.sequences import Sequences
from train.features.layout import Layout
from train.features.online import compute_features
from train.features.store import CachedFeatures
from train.threads import LOOKS, WorkThreads, work_threads


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
    assert spoken == (["1 CPU thread is faster than 2"] if count == 1 else [])


def test_it_looks_once(spoken: list[str]) -> None:
    machine = Machine(1.0, 0.5)
    threads = WorkThreads(2, clock=machine.clock)
    assert threads.timed(machine.work) == 2 * LOOKS + 1
    machine.two = 9.0
    assert not threads.due
    assert threads.look(machine.work) == 9.0
    assert (threads.count, machine.works, spoken) == (2, 3 * LOOKS + 1, [])


def test_threads_that_are_configured_stay(settings: list[str]) -> None:
    config = compose("train", TrainConfig, [*settings, "engine.threads=3"])
    threads = work_threads(config, torch.device("cpu"))
    assert not threads.due
    threads.look(Machine(1.0, 9.0).work)
    assert threads.count == 3
    config = compose("train", TrainConfig, [*settings, "engine.threads=null"])
    several = work_threads(config, torch.device("cpu"), processes=2)
    assert (several.count, several.due) == (torch.get_num_threads(), False)


def test_features_are_computed_with_the_faster_number(
    engine: Engine, responses: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is busy, as told by a clock that two threads turn faster, so batches use one thread."""
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
    assert counts == [1, 2] * LOOKS + [1] * (len(counts) - 2 * LOOKS)
    assert len(counts) == 3 + 2 * LOOKS
    batch = responses.batch(range(2))
    expected = compute_features(engine.target, batch, aux)
    served = batch.assistant
    for value, reference in zip(cached(batch).aux, expected.aux, strict=True):
        assert torch.allclose(value[served], reference[served], atol=1e-4)


def test_a_look_changes_no_update(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still finds no number faster."""
    heads, looks = [], []
    for name, looking in (("still", False), ("looking", True)):
        threads = WorkThreads(2, adaptive=looking, clock=lambda: 0.0)
        monkeypatch.setattr(
            threads, "look", lambda work, threads=threads: looks.append(WorkThreads.look(threads, work))
        )
        monkeypatch.setattr("train.loop.work_threads", lambda *_, threads=threads: threads)
        run(settings, f"run={name}", "steps=3", f"output_dir={tmp_path / name}")
        heads.append(tensors(tmp_path / name))
    assert looks == [0.0]
    assert_equal(*heads)
