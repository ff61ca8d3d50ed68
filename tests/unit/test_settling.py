"""Baseline probes of the latency of plain steps, and the cost of switching between speculative and plain steps."""

from __future__ import annotations

import pytest

from infer.speculation.control.baseline_probe import (
    DRAFTED_S,
    DRAFTED_STEPS,
    EARLY_STEPS,
    MAX_PROMPTS,
    RARELY,
    SETTLES_S,
    TEACHES_S,
    BaselineProbe,
)


def drafted_before_reminder(settling: BaselineProbe, seconds: float, speedup: float = 1.1) -> int:
    """Return the number of speculative steps, of `seconds` each, before a baseline probe starts."""
    for count in range(100_000):
        settling.next_step(speedup)
        if settling.probing:
            return count
        settling.drafted(seconds)
    raise AssertionError("it never probing")


def plain_in_reminder(settling: BaselineProbe, seconds: float) -> list[bool]:
    """Return for each plain step of the current baseline probe whether it is representative."""
    taught = []
    while settling.probing:
        taught.append(settling.plain(seconds, seconds))
        settling.next_step(1.1)
    return taught


@pytest.mark.parametrize("seconds", [0.0005, 0.0013, 0.004, 0.05, 10.0])
def test_now_and_then_nobody_drafts_until_settled_steps_were_seen(seconds):
    settling = BaselineProbe(known=True)
    for _ in range(3):
        drafted = drafted_before_reminder(settling, seconds)
        assert drafted >= DRAFTED_STEPS
        assert drafted * seconds >= DRAFTED_S
        assert drafted <= DRAFTED_STEPS or (drafted - 1) * seconds <= DRAFTED_S
        taught = plain_in_reminder(settling, seconds)
        first = taught.index(True)
        assert all(taught[first:])
        assert first * seconds >= SETTLES_S - 1e-9
        assert len(taught[first:]) * seconds >= TEACHES_S - 1e-9
        assert (len(taught) - 2) * seconds < SETTLES_S + TEACHES_S


def test_seldom_where_drafting_is_much_faster_and_soon_where_nothing_is_known():
    assert drafted_before_reminder(BaselineProbe(known=True), 0.05, speedup=1.6) == pytest.approx(
        RARELY * DRAFTED_S / 0.05, abs=1
    )
    assert drafted_before_reminder(BaselineProbe(known=False), 0.05, speedup=1.6) == EARLY_STEPS


def test_steps_with_prompts_do_not_prolong_a_reminder():
    """Steps with prefill are not reported; a probe does not suppress drafts until steps without prefill come."""
    settling, steps = BaselineProbe(known=False), 0
    drafted_before_reminder(settling, 0.01)
    while settling.probing:
        settling.next_step(1.1)
        steps += 1
    assert steps == MAX_PROMPTS


def test_a_reminder_lasts_while_every_other_step_reads_prompts():
    settling, taught = BaselineProbe(known=True), []
    drafted_before_reminder(settling, 0.01)
    while settling.probing and not any(taught):
        taught.append(settling.plain(0.004, 0.004))
        settling.next_step(1.1)
        settling.next_step(1.1)
    assert any(taught)


def test_what_plain_steps_lose_after_drafted_ones_is_what_a_change_costs():
    settling = BaselineProbe(known=True)
    for _ in range(30):
        settling.drafted(0.005)
        for lost in (0.002, 0.001, *[0.0] * 8):  # seconds lost by steps that should take 4 ms
            settling.plain(0.004 + lost, 0.004)
    assert settling.switch_s == pytest.approx(0.003, rel=0.01)
    settling.drafted(0.005)
    settling.plain(0.02, 0.004)  # drafting resumes before the machine has settled
    settling.drafted(0.005)
    assert settling.switch_s == pytest.approx(0.003, rel=0.01)
    for _ in range(30):
        settling.drafted(0.005)
        for _ in range(10):
            settling.plain(0.0035, 0.004)
    assert settling.switch_s == pytest.approx(0.0, abs=1e-4)


def test_an_odd_plain_step_puts_no_reminder_off():
    settling = BaselineProbe(known=True)
    for count in range(10 * DRAFTED_STEPS):
        settling.next_step(1.1)
        if settling.probing:
            break
        if count % 5 == 4:
            settling.plain(0.004, 0.004)
        else:
            settling.drafted(0.05)
    assert settling.probing
