"""Learning rate as a function of the step, and how many steps fit a budget of minutes.

Minutes become steps once, by measurement, and are written down: from then on a run is defined by its steps, so that
resuming it, on a slower day too, gives the same run.
"""

from __future__ import annotations

import math

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
