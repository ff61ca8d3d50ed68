"""Learning rate as a function of the step, and how many steps fit a budget of minutes.

Minutes become steps once, by measurement, and are written down: from then on a run is defined by its steps, so that
resuming it, on a slower day too, gives the same run. Under another budget the steps are decided again, and from there
on the rate is that of a run of so many steps: where the cosine had ended it rises again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from train.config import OptimConfig


def peak_rate(config: OptimConfig, hidden_size: int) -> float:
    return 1 / hidden_size if config.lr is None else config.lr


def learning_rate(step: int, steps: int, config: OptimConfig, peak: float) -> float:
    """For the update number `step`, 0-based: linear warm-up, then a cosine from `peak` down to `peak * final_lr`."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def steps_in(seconds: float, step_seconds: float, eval_seconds: float, eval_every: int) -> int:
    """Steps that fit, with an evaluation every `eval_every` steps and one at the end; at least one."""
    left = seconds - eval_seconds
    return max(1, int(left / (step_seconds + eval_seconds / eval_every)))


@dataclass(frozen=True)
class Budget:
    """How many steps a run has, and the keys that this was decided from."""

    decided: int
    steps: int | None
    minutes: float | None
    fit: int | None = None  # steps that fit `minutes`
    pace: float | None = None  # seconds per step when that was measured, its share of the evaluations included

    def changed(
        self, steps: int | None, minutes: float | None, *, done: int, fit_from_now: Callable[[], int]
    ) -> Budget:
        """Of the same run, `done` steps on, under other keys.

        Further minutes are counted at the pace that was measured; the first ones of a run that had none, from now on,
        as `fit_from_now` measures. Raises ValueError for fewer steps than are done.
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
