"""What a server knows of how its head learns."""

from __future__ import annotations

import math

from infer.learning.status import MOST_POINTS, LearningStatus


def test_the_history_is_bounded_and_has_no_gaps() -> None:
    status = LearningStatus(taken_over=2)
    assert status.judged(1.0, math.nan) is status
    for time in range(MOST_POINTS + 5):
        status = status.judged(float(time), 2.0 + time)
    assert status.tau == MOST_POINTS + 6
    assert status.history[0] == (5.0, 7.0, 2)
    assert status.history[-1] == (MOST_POINTS + 4.0, MOST_POINTS + 6.0, 2)
    assert len(status.history) == MOST_POINTS
