"""Learning rate schedules, and conversion of a budget of minutes into steps.

Minutes are converted into steps once, from measured times, and stored: from then on a run is defined by its steps, so
that resuming it at another speed gives the same run. If the budget changes, the steps are computed again, but not the
warm-up, which is over. The effect of a larger budget on a run that reached the end of its schedule depends on that:

- cosine: from there on the rate is that of a run with the new number of steps, so that it rises again.
- wsd (warm-up, stable, decay: MiniCPM, arXiv 2404.06395): the run returns to the checkpoint at which its decay began,
  and continues as a run with the larger budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from train.config import OptimConfig


def peak_rate(config: OptimConfig, hidden_size: int) -> float:
    return 1 / hidden_size if config.lr is None else config.lr


def warmup_steps(steps: int, config: OptimConfig) -> int:
    """Return the warm-up steps of a run whose first budget is `steps`."""
    return round(config.warmup * steps) if config.warmup_steps is None else config.warmup_steps


def decay_start(steps: int, config: OptimConfig) -> int:
    """Return the first step, 0-based, at which schedule=wsd lowers the rate: the last `decay` share begins there."""
    return steps - max(1, round(config.decay * steps))


def learning_rate(step: int, steps: int, config: OptimConfig, peak: float, warmup: int | None = None) -> float:
    """Return the rate of update number `step`, 0-based, in a run of `steps`, of which the first `warmup` are warm-up.

    After the linear warm-up `schedule=cosine` falls from `peak` to `peak * final_lr` at the last update, `wsd` stays at
    `peak` until `decay_start` and then falls linearly to the same end.
    """
    if warmup is None:
        warmup = warmup_steps(steps, config)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.schedule == "wsd":
        first = decay_start(steps, config)
        share = 1 - max(0, step - first + 1) / (steps - first)
    else:
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * (config.final_lr + (1 - config.final_lr) * share)


def extension(done: int, before: int, after: int, config: OptimConfig) -> Literal["return", "mark"] | None:
    """Return how a run of schedule=wsd continues after `done` steps if its budget goes from `before` to `after` steps.

    return: its decay has begun and the budget grew; continue from the checkpoint at which the decay began.
    mark: under the new budget the decay would have begun earlier; the current state is the last one without decay.
    None: no action; also for other schedules.
    """
    if config.schedule != "wsd":
        return None
    decays = done > decay_start(before, config)
    if decays:
        return "return" if after > before else None
    return "mark" if done > decay_start(after, config) else None


# Fewer updates leave a head that drafts nothing on any data (the demo's eagle3 has τ 1.18 after so many), so that its
# evaluation would mean nothing.
LEAST_UPDATES = 20
# What publishing takes, in evaluations: acceptance at temperature 0, responses at 1, and acceptance on these.
PUBLISHING = 3


def steps_in(seconds: float, step_seconds: float, eval_seconds: float, eval_every: int) -> int:
    """Return the steps that fit, at least one, with an evaluation every `eval_every` steps and what ends a run."""
    left = seconds - PUBLISHING * eval_seconds
    return max(1, int(left / (step_seconds + eval_seconds / eval_every)))


@dataclass(frozen=True)
class Budget:
    """The number of steps of a run, and the keys from which it was computed."""

    decided: int
    steps: int | None
    minutes: float | None
    fit: int | None = None  # steps that fit `minutes`
    pace: float | None = None  # measured seconds per step, including its share of evaluations
    warmup: int | None = None  # steps, fixed with the first budget; None: the run predates this field

    def changed(
        self, steps: int | None, minutes: float | None, *, done: int, fit_from_now: Callable[[], int]
    ) -> Budget:
        """Return the budget of the same run, with `done` finished steps, under other keys.

        Added minutes are converted at the measured pace; if the run had no limit in minutes, they count from now, as
        measured by `fit_from_now`. Raises ValueError for fewer steps than are done.
        """
        if (steps, minutes) == (self.steps, self.minutes):
            return self
        if steps is not None and steps < done:
            raise ValueError(
                f"steps={steps}: the run has done {done}; give at least that, or begin anew with another run="
            )
        fit = self.fit
        if minutes is None:
            fit = None
        elif self.minutes is None:
            fit = done + fit_from_now()
        elif minutes != self.minutes:
            before = self.decided if self.fit is None else self.fit
            pace = self.pace or 60 * self.minutes / before
            fit = before + int(60 * (minutes - self.minutes) / pace)
        decided = max(done, min(limit for limit in (steps, fit) if limit is not None))
        return replace(self, decided=decided, steps=steps, minutes=minutes, fit=fit)
