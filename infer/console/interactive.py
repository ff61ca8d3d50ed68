"""Runs an engine for an interactive program: one request at a time, which `stop` ends.

While idle, it measures the costs of steps in a thread, if start-up has deferred that (`Engine.profile`). Knows no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from infer.devices import use_device
from infer.engine import Engine
from infer.request import SamplingParams, StepOutput


class Stopped(Exception):
    """Interrupts the profiling in idle time, since there is a request."""


class InteractiveEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "profile", initializer=use_device, initargs=(engine.device,))
        # Set by a signal handler, which may interrupt any line: a plain attribute, as an Event contains a lock.
        self._stopping = False
        self._profile: Future[None] | None = None

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[StepOutput]:
        """Yield the steps of one request, up to its last or until `stop`. Raises ValueError if it cannot be served."""
        self._end_profile()
        self._stopping = False
        request_id = self._engine.add(prompt_ids, params)
        try:
            while self._engine.has_work:
                yield from self._engine.step()
                if self._stopping:
                    break
        finally:
            self._engine.abort(request_id)

    def stop(self) -> None:
        """End the running request after the step in progress."""
        self._stopping = True

    def idle(self) -> None:
        """Start profiling if it is due: no request is expected for now."""
        if self._profile is None and self._engine.profile_due:
            self._stopping = False
            self._profile = self._thread.submit(self._run_profile)

    def close(self) -> None:
        self._end_profile()
        self._thread.shutdown()

    def _run_profile(self) -> None:
        def check() -> None:
            if self._stopping:
                raise Stopped

        with suppress(Stopped):
            self._engine.profile(check)

    def _end_profile(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            self._stopping = True
            profile.result()
