"""The learning rate and the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from train.config import OptimConfig
from train.schedule import Budget, decay_start, extension, learning_rate, steps_in

CONFIG = OptimConfig(name="adamw", lr=1.0, warmup=0.1, final_lr=0.05)
WSD = replace(CONFIG, schedule="wsd", decay=0.25)


def test_warm_up_then_cosine() -> None:
    rates = [learning_rate(step, 100, CONFIG, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.05)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    middle = (rates[54] + rates[55]) / 2
    assert middle == pytest.approx(0.525, abs=0.01)


def test_warm_up_stable_decay() -> None:
    rates = [learning_rate(step, 100, WSD, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10:75] == [1.0] * 65
    assert rates[75:] == pytest.approx([1 - 0.95 * (step + 1) / 25 for step in range(25)])


def test_a_larger_budget_changes_no_rate_before_the_decay() -> None:
    short, long = ([learning_rate(step, steps, WSD, 1.0, 10) for step in range(75)] for steps in (100, 1000))
    assert short == long
    assert decay_start(100, WSD) == 75


def test_warm_up_in_steps() -> None:
    config = replace(CONFIG, warmup_steps=3)
    assert [learning_rate(step, 100, config, 1.0) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("done", "before", "after", "move"),
    [
        (100, 100, 200, "return"),  # had ended
        (76, 100, 101, "return"),
        (75, 100, 200, None),  # the decay has not begun
        (90, 100, 95, None),  # the decay has begun, and ends earlier
        (70, 100, 80, "mark"),  # with 80 steps the decay begins at 60
        (60, 100, 80, None),
    ],
)
def test_what_becomes_of_a_run_under_another_budget(done: int, before: int, after: int, move: str | None) -> None:
    assert extension(done, before, after, WSD) == move
    assert extension(done, before, after, CONFIG) is None


@pytest.mark.parametrize("config", [CONFIG, WSD])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_very_short_runs_have_a_rate(steps: int, config: OptimConfig) -> None:
    assert all(0 < learning_rate(step, steps, config, 1.0) <= 1.0 for step in range(steps))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schedule", "linear", "optim.schedule=linear"),
        ("decay", 0, "optim.decay=0: must be above 0 and at most 1"),
        ("decay", 1.5, "optim.decay=1.5: must be above 0 and at most 1"),
        ("warmup_steps", -1, "optim.warmup_steps=-1"),
    ],
)
def test_schedules_that_there_are_not(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **{key: value})


def test_steps_that_fit_a_budget() -> None:
    # 130 s: 3 * 10 for publishing, and 100 at 1 + 10/10 s a step
    assert steps_in(130, step_seconds=1, eval_seconds=10, eval_every=10) == 50
    assert steps_in(1, step_seconds=60, eval_seconds=10, eval_every=10) == 1


@pytest.mark.parametrize(
    ("keys", "decided"),
    [
        ({"steps": 100, "minutes": 25.0}, 100),  # unchanged
        ({"steps": 300, "minutes": 25.0}, 250),  # as many as fit into 25 minutes
        ({"steps": 300, "minutes": 35.0}, 300),
        ({"steps": None, "minutes": 35.0}, 350),  # ten more at 6 s a step
        ({"steps": 400, "minutes": None}, 400),
        ({"steps": None, "minutes": 1.0}, 60),  # fewer than are done: ends there
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
