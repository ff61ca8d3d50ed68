"""What a server knows of how its head learns, for its metrics and its page."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

TAUS = ("tau_before", "tau_after", "replay_before", "replay_after")  # of a candidate; nan: there is no replay
MOST_POINTS = 512  # of the history; the oldest go first


@dataclass(frozen=True)
class LearningStatus:
    """As the trainer last said. `EngineLoop.learning` and `Runtime.learning` have the newest one, from any thread."""

    running: bool = True  # the trainer's process is alive; false: the head stays as it is
    tau: float = math.nan  # acceptance length of the head in use on traffic that is held back; nan: not yet judged
    tau_before: float = math.nan  # the same before and after the last candidate that was taken over
    tau_after: float = math.nan
    replay_before: float = math.nan  # of the head that learning began with, and of that candidate, on its replay
    replay_after: float = math.nan
    taken_over: int = 0  # candidates that the engine drafts with, or has drafted with
    refused: int = 0  # candidates that are no weights of this head
    buffered: int = 0  # tokens of the examples that the trainer keeps
    examples: int = 0  # made of requests so far
    dropped: int = 0  # of these: the trainer did not read them in time
    updates: int = 0
    seconds: float = 0.0  # of one CPU thread, for updates and comparisons
    # (Unix time in seconds, tau, candidates taken over until then) of each judgement, oldest first; two where one was
    history: tuple[tuple[float, float, int], ...] = ()

    def judged(self, time: float, tau: float) -> LearningStatus:
        """Return the status after the head in use was judged; nan changes nothing."""
        if math.isnan(tau):
            return self
        return replace(self, tau=tau, history=(*self.history, (time, tau, self.taken_over))[-MOST_POINTS:])
