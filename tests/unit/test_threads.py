"""The number of threads per step on a machine that becomes busy, and idle again, with simulated time."""

from __future__ import annotations

import pytest
import torch

from infer.processes import threads as module
from infer.processes.threads import (
    CLEARLY,
    FIRST_S,
    LOOK_S,
    LOOKS_SHARE,
    MIN_LOOKS,
    SELDOM_S,
    SLOW_STEPS,
    ThreadPlan,
    Threads,
    timed_pass,
)
from kernels.linear import PackedLinear


class Machine:
    """Two threads take half the time of one, but on a busy machine they wait for each other."""

    def __init__(self, step: float = 1e-3) -> None:
        self.step, self.busy, self.probe_seconds, self.step_seconds = step, False, 0.0, 0.0

    def seconds(self, rows: int, count: int) -> float:
        alone = self.step * (1 + rows / 16)
        if count == 1:
            return alone * (2 if self.busy else 1)
        return 20 * alone if self.busy else alone / 2

    def run(self, rows: int, count: int) -> float:
        seconds = self.seconds(rows, count)
        self.probe_seconds += seconds
        return seconds

    def decode(self, threads: Threads, seconds: float, rows: int = 1) -> list[int]:
        """Run steps for `seconds`; return the number of threads of each."""
        counts, end = list[int](), self.step_seconds + seconds
        while self.step_seconds < end:
            counts.append(threads.plan.count(rows))
            elapsed = self.seconds(rows, counts[-1])
            self.step_seconds += elapsed
            threads.record_step(rows, elapsed)
        return counts


def make_threads(machine: Machine) -> Threads:
    threads = Threads(ThreadPlan.measure(machine.run, 2), machine.run, 2)
    machine.probe_seconds = 0.0
    return threads


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("step", [1e-3, 0.05])
def test_threads_are_given_up_while_the_machine_is_busy_and_taken_again(rows, step):
    machine = Machine(step)
    threads = make_threads(machine)
    assert set(machine.decode(threads, 5.0, rows)) == {2}
    machine.busy = True
    counts = machine.decode(threads, 60 * machine.seconds(rows, 2) + FIRST_S, rows)
    assert counts.index(1) <= max(SLOW_STEPS, 1 + FIRST_S / machine.seconds(rows, 2))
    assert set(machine.decode(threads, 5000 * step, rows)) == {1}
    machine.busy = False
    counts = machine.decode(threads, 1500.0 if step > 0.01 else 90.0, rows)
    assert counts[-1] == 2
    assert set(counts[counts.index(2) :]) == {2}
    assert machine.probe_seconds < 1.5 * LOOKS_SHARE * machine.step_seconds + 20 * machine.seconds(16, 1)


def test_a_start_on_a_busy_machine_is_corrected_once_it_is_idle():
    machine = Machine()
    machine.busy = True
    threads = make_threads(machine)
    assert threads.plan.count(1) == 1
    machine.busy = False
    counts = machine.decode(threads, 3 * SELDOM_S)
    assert counts[0] == 1
    assert counts[-1] == 2


@pytest.mark.parametrize(("ratio", "count"), [(CLEARLY - 0.05, 1), (CLEARLY + 0.05, 2), (1.0, 2), (2.0, 2)])
def test_one_thread_must_be_clearly_faster(ratio, count):
    """Else chance would decide where one thread reads as fast as memory delivers, and eight rows would take longer."""
    assert ThreadPlan.measure(lambda rows, threads: ratio if threads == 1 else 1.0, 2) == ThreadPlan(count, count)


def test_a_number_that_gives_other_bits_is_not_used():
    machine, requested = Machine(), []
    threads = make_threads(machine)
    threads.admit = lambda count: requested.append(count) or False
    machine.busy = True
    assert set(machine.decode(threads, 20.0)) == {2}
    assert set(requested) == {1}


def test_threads_that_are_about_as_fast_are_left_as_they_are():
    machine = Machine()
    threads = Threads(ThreadPlan(2, 2), lambda rows, count: (CLEARLY + 0.05) if count == 1 else 1.0, 2)
    for _ in range(400):
        threads.record_step(1, machine.step)
    for _ in range(4000):
        threads.record_step(1, 5 * machine.step)
    assert threads.plan == ThreadPlan(2, 2)


def test_a_number_that_was_configured_stays():
    machine = Machine()
    threads = Threads(ThreadPlan(2, 2))
    machine.busy = True
    assert set(machine.decode(threads, 20.0)) == {2}


@pytest.mark.parametrize("step", [1e-3, 0.05])
def test_a_look_holds_streams_up_for_moments(step):
    """On a large target a dozen passes would take seconds; on a small one a few would say nothing."""
    machine = Machine(step)
    threads = make_threads(machine)
    machine.decode(threads, SELDOM_S + 1)
    longest = max(machine.seconds(rows, 1) + machine.seconds(rows, 2) for rows in (2, 16))
    assert 0 < machine.probe_seconds <= 2 * max(LOOK_S + longest, MIN_LOOKS * longest)


def test_a_timing_takes_a_sample_of_a_large_target(monkeypatch):
    layers = [PackedLinear(torch.zeros(64, 64)) for _ in range(20)]
    monkeypatch.setattr(module, "SAMPLE_BYTES", 5 * layers[0].bytes)
    called = []
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: called.append((self, x.shape[0])))
    assert timed_pass(layers, torch.float32, iter([1.0, 3.5]).__next__)(2, 1) == 2.5
    assert [rows for _, rows in called] == [2] * 5
    assert len({id(layer) for layer, _ in called}) == 5
    called.clear()
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1)
    timed_pass(layers, torch.float32, iter([0.0, 1.0]).__next__)(2, 1)
    assert len(called) == 1
