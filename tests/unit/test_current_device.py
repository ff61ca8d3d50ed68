"""On which GPU each thread launches: Triton uses the thread's current one, and every thread begins with the first."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from infer.console.interactive import InteractiveEngine
from infer.devices import use_device
from infer.engine import Engine
from infer.server.engine_loop import EngineLoop
from models.targets import load_target

SECOND = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """The GPU that each thread has chosen, by its name."""
    chosen: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.update({threading.current_thread().name: device})
    )
    return chosen


def test_an_engine_is_made_on_the_gpu_of_its_target(tiny_target_folder, current, monkeypatch) -> None:
    class Packs(Exception):
        pass

    def shard(*args: Any, **options: Any) -> None:
        raise Packs

    target = load_target(str(tiny_target_folder))
    monkeypatch.setattr("infer.engine.engine.Shard", shard)
    with FakeTensorMode():
        target.norm.weight = torch.nn.Parameter(torch.empty(target.norm.weight.shape, device=SECOND))
    with pytest.raises(Packs):
        Engine(target)
    assert current == {"MainThread": SECOND}


def test_costs_are_profiled_on_the_gpu_of_the_engine(current) -> None:
    at_work: list[torch.device | None] = []
    engine: Any = SimpleNamespace(device=SECOND, profile_due=True)
    engine.profile = lambda check: at_work.append(current.get(threading.current_thread().name))
    interactive = InteractiveEngine(cast("Engine", engine))
    interactive.idle()
    interactive.close()
    assert at_work == [SECOND]
    assert "MainThread" not in current


def test_the_thread_of_a_server_uses_the_gpu_of_its_engine(current) -> None:
    """Also of an engine that was made in another thread."""
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    commands.put(None)
    engine: Any = SimpleNamespace(device=SECOND, has_work=False)
    loop = EngineLoop(engine, commands, lambda events, stats: None)
    thread = threading.Thread(target=loop.run, name="engine")
    thread.start()
    thread.join()
    assert current == {"engine": SECOND}


def test_a_cpu_and_an_unnumbered_gpu_change_nothing(current) -> None:
    for name in ("cpu", "cpu:0", "cuda"):
        use_device(torch.device(name))
    assert current == {}
