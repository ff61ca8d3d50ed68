"""An engine in a thread of its own, for a program that waits for a person: one request at a time, which `stop` ends.

While nobody asks, what steps cost is measured if a start has put that off (`Engine.profile`). Knows no text.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from infer.engine import Engine
from infer.request import SamplingParams, StepOutput


class Stopped(Exception):
    """What is measured in idle time has to wait: there is a request."""


class EngineThread:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._thread = engine, ThreadPoolExecutor(1, "engine")
        # Set by a signal's handler, which may interrupt any line: a plain attribute, no Event with a lock inside.
        self._stopping = False
        self._profile: Future[None] | None = None

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[StepOutput]:
        """The steps of one request as they come, up to its last, or until `stop`. ValueError: it cannot be served."""
        self._end_profile()
        self._stopping = False
        outputs: queue.SimpleQueue[StepOutput | None] = queue.SimpleQueue()
        done = self._thread.submit(self._run, prompt_ids, params, outputs)
        while (output := outputs.get()) is not None:
            yield output
        done.result()

    def stop(self) -> None:
        """Ends the request that is running, after the step in progress."""
        self._stopping = True

    def idle(self) -> None:
        """Nobody asks for now."""
        if self._profile is None and self._engine.profile_due:
            self._stopping = False
            self._profile = self._thread.submit(self._run_profile)

    def close(self) -> None:
        self._end_profile()
        self._thread.shutdown()

    def _run(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        outputs: queue.SimpleQueue[StepOutput | None],
    ) -> None:
        try:
            request_id = self._engine.add(prompt_ids, params)
            while self._engine.has_work:
                for output in self._engine.step():
                    outputs.put(output)
                if self._stopping:
                    self._engine.abort(request_id)
        finally:
            outputs.put(None)

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
