"""The bridge between the event loop and the engine's thread: admission, delivery of outputs, and the engine's state.

Requests go in through a queue; outputs come back with `call_soon_threadsafe`, one call per step. HTTP therefore never
waits for a step and a step never waits for HTTP. Everything here runs in the event loop unless marked otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from infer.batch.constraint import Constraint
from infer.config import ServerConfig
from infer.engine import Engine
from infer.engine.offline import completion_params
from infer.learning.loop import LearningLoop
from infer.request import SamplingParams
from infer.server.engine_loop import Add, Command, EngineLoop, Event, Failure, is_last
from infer.server.protocol.errors import ApiError
from infer.server.watchdog import Watchdog
from infer.steps.stats import EngineStats

log = logging.getLogger("headway.server")

State = Literal["loading", "ready", "draining", "dead"]
WHY_CLOSED = {
    "loading": "the model is still loading",
    "draining": "the server is shutting down",
    "dead": "the engine has stopped",
}


class Runtime:
    """Loads the engine in a separate thread and runs it there until `stop`; `learn` lets its head learn."""

    def __init__(
        self, load: Callable[[], Engine], config: ServerConfig, learn: Callable[[Engine], LearningLoop] | None = None
    ) -> None:
        self.state: State = "loading"
        self.snapshot = EngineStats()
        self.stalls = 0  # steps that took longer than `server.stall_s`
        self.learning: LearningLoop | None = None  # set once the engine is loaded, if its head learns
        self.config, self._load, self._learn = config, load, learn
        self._max_batch = 0  # set once the engine is loaded
        self._outputs: dict[str, asyncio.Queue[Event]] = {}  # of unfinished engine requests, by id
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.died = threading.Event()  # set in the engine's thread after a step has raised

    def start(self) -> asyncio.Future[Engine]:
        """Start the engine's thread. The future returns the loaded engine, or raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        self.dead = asyncio.Event()  # like `died`, in the event loop: all requests have been failed
        self._loaded: asyncio.Future[Engine] = self._loop.create_future()
        self._thread.start()
        return self._loaded

    @property
    def loaded(self) -> bool:
        return self._max_batch > 0

    @property
    def in_flight(self) -> int:
        return len(self._outputs)

    def check_open(self) -> None:
        """Raises a 503 ApiError that names the state, unless it is ready."""
        if self.state != "ready":
            raise ApiError(503, WHY_CLOSED[self.state], code=self.state, retry_after=1)

    @property
    def room(self) -> int:
        """How many more choices can be accepted: the maximum batch and waiting queue, less those in flight."""
        return self._max_batch + self.config.max_waiting - self.in_flight

    def check_room(self, count: int) -> None:
        """Raises a 429 ApiError if `count` exceeds `room`. Also called before tokenization, to save that work."""
        if count > self.room:
            raise ApiError(429, "too many requests are waiting; try again later", code="queue_full", retry_after=1)

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        constraint: Constraint | None,
        outputs: asyncio.Queue[Event],
    ) -> list[str]:
        """Queue `params.n` choices per prompt and return their ids, in prompt order. `outputs` takes what they yield.

        Each choice gets a copy of `constraint`, and must be ended by `abort` unless its last output was taken.
        """
        self.check_open()
        self.check_room(len(prompts) * params.n)
        singles = completion_params(params)
        jobs: list[Add] = []
        for prompt_ids in prompts:
            first = None
            for single in singles:
                constraint_copy = constraint and constraint.copy()
                jobs.append(Add(f"r{next(self._ids)}", prompt_ids, single, first, constraint_copy))
                first = first or jobs[-1].request_id
        for job in jobs:
            self._outputs[job.request_id] = outputs
            self._commands.put(job)
        return [job.request_id for job in jobs]

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait up to `seconds` for the running ones, then fail the rest with a 503."""
        if self.state != "dead":
            self.state = "draining"
        deadline = self._loop.time() + seconds
        while self._outputs and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        if self._outputs:
            log.warning("shutting down: ending %d requests that did not finish in time", self.in_flight)
        self._fail_all(ApiError(503, WHY_CLOSED["draining"], code="draining", retry_after=1))

    def stop(self, timeout: float) -> bool:
        """Stop the engine's thread. Returns False if it did not end in time: it is loading, or in a long step."""
        self._commands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def abort(self, request_id: str) -> bool:
        """End a choice. Returns whether it was unfinished."""
        unfinished = self._outputs.pop(request_id, None) is not None
        if unfinished:
            self._commands.put(request_id)
        return unfinished

    def _fail_all(self, error: ApiError) -> None:
        for request_id, outputs in list(self._outputs.items()):
            outputs.put_nowait(Failure(request_id, error))
            self.abort(request_id)

    def _on_loaded(self, engine: Engine) -> None:
        self._max_batch = engine.config.max_batch
        if self.state == "loading":
            self.state = "ready"
        if not self._loaded.done():
            self._loaded.set_result(engine)

    def _on_load_failed(self, error: BaseException) -> None:
        self.state = "dead"
        if not self._loaded.done():
            self._loaded.set_exception(error)

    def _on_step(self, events: list[Event], snapshot: EngineStats) -> None:
        self.snapshot = snapshot
        for event in events:
            outputs = self._outputs.get(event.request_id)
            if outputs is not None:  # else it was aborted while this event was in flight
                if is_last(event):
                    del self._outputs[event.request_id]
                outputs.put_nowait(event)

    def _on_stall(self) -> None:
        self.stalls += 1

    def _on_death(self) -> None:
        self.state = "dead"
        self._fail_all(ApiError(500, "the engine has stopped; the server's log says why", code="engine_dead"))
        self.dead.set()

    def _run(self) -> None:
        """Load and run the engine. Body of the engine's thread, which reaches the event loop only through `_report`."""
        try:
            engine = self._load()
            self.learning = None if self._learn is None else self._learn(engine)
        except BaseException as error:  # the future of `start` raises it, whatever it is
            self._report(self._on_load_failed, error)
            return
        self._report(self._on_loaded, engine)
        report = partial(self._report, self._on_step)
        loop = EngineLoop(engine, self._commands, report, learning=self.learning)
        watchdog = Watchdog(loop, threading.get_ident(), self.config.stall_s, lambda: self._report(self._on_stall))
        if self.config.stall_s:
            watchdog.start()
        try:
            loop.run()
        except BaseException:  # whatever was raised, the engine computes no more
            log.exception("the engine has stopped")
            self._report(self._on_death)
            self.died.set()
            with contextlib.suppress(Exception):
                engine.close()  # ends the other tensor parallel ranks
        finally:
            watchdog.stop()
            if self.learning is not None:
                self.learning.close()

    def _report(self, callback: Callable[..., None], *args: object) -> None:
        """Schedule `callback` in the event loop, from the engine's thread.

        The loop may already be closed if the process was told to exit immediately.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)
