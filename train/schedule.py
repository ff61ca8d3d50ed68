"""Learning rate as a function of the step, and how many steps fit a budget of minutes.

Minutes become steps once, by measurement, and are written down: from then on a run is defined by its steps, so that
resuming it, on a slower day too, gives the same run. Under another budget the steps are decided again. The warm-up is
not: it is over. What a larger budget means for a run that has reached the end of its schedule depends on the schedule:

- cosine: from there on the rate is that of a run of so many steps, so that it rises again.
- wsd (warm-up, stable, decay: MiniCPM, arXiv 2404.06395): the run returns to the checkpoint at which its decay began,
  and becomes the run of the larger budget.
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
    """Of a run that begins with a budget of `steps`."""
    return round(config.warmup * steps) if config.warmup_steps is None else config.warmup_steps


def decay_start(steps: int, config: OptimConfig) -> int:
    """The first step, 0-based, at which schedule=wsd lowers the rate: the last `decay` share begins there."""
    return steps - max(1, round(config.decay * steps))


def learning_rate(step: int, steps: int, config: OptimConfig, peak: float, warmup: int | None = None) -> float:
    """For the update number `step`, 0-based, of a run of `steps`, the first `warmup` of them with a rising rate.

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
    """What becomes of a run of schedule=wsd, `done` steps on, whose budget goes from `before` to `after` steps.

    return: its rate decays already and the run is to go further; it goes on from where the decay began.
    mark: the decay would have begun before; where the run stands is the last state that has seen none of it.
    """
    if config.schedule != "wsd":
        return None
    decays = done > decay_start(before, config)
    if decays:
        return "return" if after > before else None
    return "mark" if done > decay_start(after, config) else None


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
    warmup: int | None = None  # steps, decided with the first budget; None: of a run begun before this was written down

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
