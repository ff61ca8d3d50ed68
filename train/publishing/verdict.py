"""Says in one line when a run's acceptance length means nothing, why, and what would give more."""

from __future__ import annotations

import math

USEFUL = 1.25  # τ below which fewer than a quarter of the verifies accept a drafted token: drafting cannot pay
ENOUGH = 200  # updates after which the demo's eagle3 has τ 1.5


def verdict(
    tau: float, updates: int, *, tokens: int, seconds: float, other_seconds: float, minutes: float | None
) -> str | None:
    """Return the line for a head of acceptance length `tau` after `updates`, None if it is useful.

    The updates took `seconds` for `tokens`, all else `other_seconds`. `minutes`: the budget, if that ended the run.
    """
    if tau >= USEFUL:
        return None
    made = f"τ {tau:.2f} after {counted(updates, 'update')}"
    if updates >= ENOUGH:
        return f"{made}: this head drafts hardly anything; train on more data, longer, or with another optim.lr"
    needed = other_seconds + ENOUGH * seconds / max(updates, 1)
    more = f"steps={ENOUGH} would take about {counted(math.ceil(needed / 60), 'minute')}"
    if minutes is not None:
        more = f"minutes={math.ceil(max(needed / 60, minutes + 1))} would make about {ENOUGH} updates"
    return f"{made} means nothing yet: this machine made {tokens / max(seconds, 1e-9):,.0f} tokens/s; {more}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
