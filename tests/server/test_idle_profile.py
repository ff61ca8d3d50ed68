"""The engine's thread measures the costs of steps while there are no requests, and stops for one."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.config import EngineConfig, ModelConfig, ProposerConfig
from infer.engine import Engine
from infer.request import SamplingParams, StepOutput
from infer.server import engine_loop
from infer.server.engine_loop import Add, Command, EngineLoop, Event


@pytest.fixture
def engine(tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # which holds no costs
    monkeypatch.setattr(engine_loop, "IDLE_CHECK_S", 0.01)
    return Engine.load(
        ModelConfig(name="tiny", path=str(tiny_target_folder), device="cpu"),
        None,
        EngineConfig(max_batch=2),
        ProposerConfig(name="ngram", adaptive=True),
        profile=False,
    )


def test_a_request_interrupts_profiling_which_begins_anew_when_idle(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway.server")
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    events: list[str] = []
    profile = engine.profile

    def profile_beside_a_request(check: Callable[[], None]) -> None:
        first = "profile" not in events
        events.append("profile")
        if first:
            commands.put(Add("r", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)))
        try:
            profile(check)
        finally:
            events.append("due" if engine.profile_due else "done")
        commands.put(None)

    def report(outputs: list[Event], stats: Any) -> None:
        events.extend("request" for output in outputs if isinstance(output, StepOutput) and output.finish_reason)

    monkeypatch.setattr(engine, "profile", profile_beside_a_request)
    EngineLoop(engine, commands, report).run()
    assert events == ["profile", "due", "request", "profile", "done"]
    (line,) = [record.getMessage() for record in caplog.records]
    # on a machine that is too busy nothing is measured
    assert line.startswith(("measured on this machine: step ", "costs not measured: no drafts until "))
