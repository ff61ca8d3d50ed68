"""The learning rate and the budget."""

from __future__ import annotations

from typing import Any

import pytest

from train.config import OptimConfig
from train.schedule import Budget, learning_rate, steps_in

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


@pytest.mark.parametrize(
    ("keys", "decided"),
    [
        ({"steps": 100, "minutes": 25.0}, 100),  # as it was
        ({"steps": 300, "minutes": 25.0}, 250),  # 25 minutes hold so many
        ({"steps": 300, "minutes": 35.0}, 300),
        ({"steps": None, "minutes": 35.0}, 350),  # ten more at 6 s a step
        ({"steps": 400, "minutes": None}, 400),
        ({"steps": None, "minutes": 1.0}, 60),  # less than what is done: ends there
    ],
)
def test_another_budget(keys: dict[str, Any], decided: int) -> None:
    before = Budget(100, steps=100, minutes=25.0, fit=250, pace=6.0)
    after = before.changed(**keys, done=60, fit_from_now=lambda: 7)
    assert after.decided == decided
    assert after.changed(**keys, done=60, fit_from_now=lambda: 7) is after
    back = after.changed(100, 25.0, done=60, fit_from_now=lambda: 250 - 60)
    assert (back.decided, back.fit) == (100, 250)


def test_the_first_minutes_of_a_run_count_from_now() -> None:
    budget = Budget(100, steps=100, minutes=None)
    assert budget.changed(None, 5.0, done=60, fit_from_now=lambda: 7).decided == 67
    with pytest.raises(ValueError, match="steps=59: the run has done 60; give at least that, or begin anew"):
        budget.changed(59, None, done=60, fit_from_now=lambda: 7)
