"""The learning rate and the budget."""

from __future__ import annotations

import pytest

from train.config import OptimConfig
from train.schedule import learning_rate, steps_in

CONFIG = OptimConfig(name="adamw", lr=1.0, warmup=0.1, final_lr=0.05)


def test_warm_up_then_cosine() -> None:
    rates = [learning_rate(step, 100, CONFIG, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.05)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    middle = (rates[54] + rates[55]) / 2
    assert middle == pytest.approx(0.525, abs=0.01)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_very_short_runs_have_a_rate(steps: int) -> None:
    assert all(0 < learning_rate(step, steps, CONFIG, 1.0) <= 1.0 for step in range(steps))


def test_steps_that_fit_a_budget() -> None:
    # 110 s: 10 for the last evaluation, and 100 at 1 + 10/10 s a step
    assert steps_in(110, step_seconds=1, eval_seconds=10, eval_every=10) == 50
    assert steps_in(1, step_seconds=60, eval_seconds=10, eval_every=10) == 1
