"""Which process a group has lost, from connections alone: three in one process, the last of them killed or ended."""

from __future__ import annotations

import queue
from multiprocessing import Pipe

import pytest

from infer.processes import messages
from infer.processes.liveness import ENDED, FAILED, Liveness

HANG_S = 300.0


class Group:
    """Rank 0 and two others, the second of which is only the far end of a connection."""

    def __init__(self):
        (near, far), (other_near, self.killed) = Pipe(), Pipe()
        self.reports = {0: queue.SimpleQueue(), 1: queue.SimpleQueue()}
        self.first = Liveness(0, {1: near, 2: other_near}, lambda *loss: self.reports[0].put(loss))
        self.other = Liveness(1, {0: far}, lambda *loss: self.reports[1].put(loss))
        self.first.start()
        self.other.start()

    def close(self):
        self.first.close()
        self.other.close()


@pytest.fixture
def group():
    made = Group()
    yield made
    made.close()


def test_a_closed_connection_is_a_lost_process_and_all_learn_which(group):
    group.killed.close()
    for reports in group.reports.values():
        assert reports.get(timeout=HANG_S) == (2, ENDED)
    assert [process.loss(HANG_S) for process in (group.first, group.other)] == ["rank 2 has ended"] * 2


def test_a_process_that_says_that_it_ends_is_not_lost(group):
    messages.send(group.killed, [2, ""])
    group.killed.close()
    group.other.close()
    group.first.close()
    assert not any(process.loss() for process in (group.first, group.other))
    assert all(reports.empty() for reports in group.reports.values())


def test_a_process_that_fails_says_so(group):
    group.first.close(FAILED)
    assert group.reports[1].get(timeout=HANG_S) == (0, FAILED)
    assert group.other.loss(HANG_S) == "rank 0 has failed"


def test_only_the_first_loss_is_reported(group):
    group.killed.close()
    assert group.reports[0].get(timeout=HANG_S) == (2, ENDED)
    group.other.close(FAILED)
    group.first.close()
    assert group.reports[0].empty()
    assert group.first.loss() == "rank 2 has ended"


def test_closing_ends_a_wait_within_the_report():
    near, far = Pipe()
    waited = queue.SimpleQueue()
    process = Liveness(0, {1: near}, lambda *loss: waited.put(process.closed(HANG_S)))
    process.start()
    far.close()
    assert process.loss(HANG_S)
    process.close()
    assert waited.get(timeout=HANG_S) is True
