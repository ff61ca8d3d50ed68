"""The loop of the engine's thread: take commands, step the engine, report. Independent of asyncio and of endpoints.

Commands arrive through a queue that is emptied between steps, so an abort frees its KV pages before the next step.
While there are none, the costs of steps and drafts are measured, if the start has left that to idle time.
"""

from __future__ import annotations

import logging
import queue
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from infer.batch.constraint import Constraint
from infer.console.card import describe_costs
from infer.devices import use_device
from infer.engine import Engine
from infer.learning.loop import LearningLoop
from infer.request import SamplingParams, StepOutput
from infer.sampling.isolation import panics_as_errors
from infer.server.protocol.errors import ApiError, internal_error
from infer.steps.stats import EngineStats

log = logging.getLogger("headway.server")
IDLE_CHECK_S = 1.0  # how often an idle engine looks whether its tensor parallel ranks still run, and profiles if due


@dataclass(frozen=True)
class Add:
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    parent: str | None = None  # id of an earlier request with the same prompt (for n > 1)
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Failure:
    request_id: str
    error: ApiError


Command = Add | str | None  # a request, the id of one to abort, or None: stop
Event = StepOutput | Failure


def is_last(event: Event) -> bool:
    return isinstance(event, Failure) or event.finish_reason is not None


class Interrupted(Exception):
    """Ends profiling, since there is a command."""


@dataclass(eq=False)
class EngineLoop:
    """Runs the engine. `report` is called after every iteration; `run` ends on a None, or raises what `step` raised."""

    engine: Engine
    commands: queue.SimpleQueue[Command]
    report: Callable[[list[Event], EngineStats], None]
    clock: Callable[[], float] = time.monotonic
    busy_since: float | None = None  # when the step in progress began; None between steps
    learning: LearningLoop | None = None  # of a server that trains its head

    def run(self) -> None:
        use_device(self.engine.device)
        while True:
            events: list[Event] = []
            if not self._take_commands(events):
                return
            if self.engine.has_work:
                self.busy_since = self.clock()
                events += self.engine.step()
                self.busy_since = None
            self.report(events, self.engine.stats.snapshot())
            self._learn()

    def _take_commands(self, events: list[Event]) -> bool:
        """Apply all queued commands, and wait for one if the engine has no work. Returns False on a None.

        Raises RankLost if a tensor parallel rank has ended meanwhile.
        """
        wait = not self.engine.has_work
        while True:
            try:
                command = self.commands.get(block=wait, timeout=IDLE_CHECK_S)
            except queue.Empty:
                if not wait:
                    return True
                self.engine.check_ranks()
                self._profile()
                self._learn()
                continue
            wait = False
            if command is None:
                return False
            if isinstance(command, str):
                self.engine.abort(command)
            elif (error := self._add(command)) is not None:
                events.append(Failure(command.request_id, error))

    def _learn(self) -> None:
        if self.learning is not None:
            self.learning.between_steps()

    def _profile(self) -> None:
        """Measure the costs of steps and drafts, if that is due, unless a command arrives meanwhile."""

        def check() -> None:
            if not self.commands.empty():
                raise Interrupted

        if not self.engine.profile_due:
            return
        try:
            with nullcontext() if self.learning is None else self.learning.paused():
                self.engine.profile(check)
        except Interrupted:
            return
        if rows := describe_costs(self.engine.costs):
            log.info("measured on this machine: %s", "; ".join(f"{name} {cost}" for name, cost in rows))
        else:
            log.info("costs not measured: no drafts until trial steps have corrected a guess of what drafts cost")

    def _add(self, command: Add) -> ApiError | None:
        """Add a request to the engine. Returns the error if that fails, so that other requests are not affected."""
        try:
            with panics_as_errors():
                self.engine.add(
                    command.prompt_ids,
                    command.params,
                    request_id=command.request_id,
                    parent=command.parent,
                    constraint=command.constraint,
                )
        except ValueError as error:
            return ApiError(400, str(error), param=re.split("[=: ]", str(error), maxsplit=1)[0], code="invalid_prompt")
        except Exception:
            log.exception("could not add a request to the engine")
            return internal_error()
        return None
