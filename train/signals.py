"""Handling of Ctrl-C, SIGTERM and SIGUSR1: the first requests a stop at the next safe point, a second stops at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupted(Exception):
    """Raised to abort work that may be discarded (generating, evaluating) because a stop was requested."""


class StopRequest:
    """Context manager that installs the signal handlers; outside the main thread it has no effect."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> StopRequest:
        try:
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        except ValueError:  # not the main thread
            self._previous = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def check(self) -> None:
        """Raises Interrupted if a stop was requested."""
        if self.requested:
            raise Interrupted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        print("\nstopping at the next safe point; a second signal stops immediately", file=sys.stderr, flush=True)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
