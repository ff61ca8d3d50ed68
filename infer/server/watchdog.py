"""Watchdog that reports an engine step that does not end: one log line and the stack of every thread.

It ends nothing, because a step may be slow for a transient reason. A step that compiles a kernel on first use is
allowed ten times as long. A step that never releases the GIL cannot be detected here.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from infer.server.engine_loop import EngineLoop

log = logging.getLogger("headway.server")

LOOKS = 4  # checks per stall_s
COMPILING = 10  # factor on stall_s while a kernel compiles
COMPILERS = ("triton.compiler", "triton.runtime.build", "triton.backends", "kernels.cpu.library", "torch._inductor")


@dataclass(eq=False)
class Watchdog:
    """Monitors `loop`, run by the thread `thread_id`, until `stop`. `on_stall` is called once per stall."""

    loop: EngineLoop
    thread_id: int
    stall_s: float
    on_stall: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    _stalled: float | None = None  # start time of the step that was last reported as stalled
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        begin, now = self.loop.busy_since, self.clock()
        if self._stalled is not None and begin != self._stalled:
            log.warning("the stalled step has ended, at most %.1f s after it began", now - self._stalled)
            self._stalled = None
        if begin is None or begin == self._stalled or now - begin < self.stall_s:
            return
        frame = sys._current_frames().get(self.thread_id)
        if now - begin < COMPILING * self.stall_s and is_compiling(frame):
            return
        self._stalled = begin
        log.error(
            "the engine stalls: a step has been running for %.1f s (server.stall_s=%g); %s; all threads' stacks follow",
            now - begin,
            self.stall_s,
            self.loop.engine.activity,
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self.on_stall()

    def _run(self) -> None:
        while not self._stopped.wait(self.stall_s / LOOKS):
            self.look()


def is_compiling(frame: FrameType | None) -> bool:
    """Return whether a module that compiles kernels is on this stack."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(COMPILERS):
            return True
        frame = frame.f_back
    return False
