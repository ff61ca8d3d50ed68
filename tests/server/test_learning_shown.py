"""What a server says of how its head learns: on /metrics, at /learning and on the page."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, expect

from tests.server import patient
from tests.server.harness import MakeServer, Server, repeat_until, wait_until
from tests.server.test_learning import EAGER, learning_of, status_of
from tests.server.test_playground import PHONE, browser, open_page  # noqa: F401

NAMES = {
    "heads_taken_over_total": "taken_over",
    "heads_refused_total": "refused",
    "examples_total": "examples",
    "examples_dropped_total": "dropped",
    "updates_total": "updates",
    "seconds_total": "seconds",
    "buffered_tokens": "buffered",
    "acceptance_length": "tau",
    "replay_acceptance_length": "replay_after",
    "running": "running",
}


@pytest.fixture(scope="module")
def learnt(make_server: MakeServer) -> Iterator[Server]:
    """A server whose head has learnt, and whose trainer has ended, so that no number changes any more."""
    with make_server(learning=EAGER) as server:
        assert patient.get(f"{server.url}/learning").json()["tau"] is None
        assert "headway_learning_acceptance_length" not in server.metrics()
        seeds = itertools.count()

        def ask() -> None:
            seed = next(seeds)
            body = {"prompt": ["x = 1\n", "def f("][seed % 2] + str(seed % 10), "max_tokens": 32, "seed": seed % 20}
            server.complete(**body, temperature=0.4 * (seed % 2), ignore_eos=True)

        repeat_until(lambda: status_of(server).tau == status_of(server).tau_after, ask)
        os.kill(learning_of(server)._trainer.pid, signal.SIGTERM)
        wait_until(lambda: not status_of(server).running)
        assert status_of(server).taken_over > 0
        loop = learning_of(server)
        assert "headway_learning_replay_acceptance_length" not in server.metrics()
        assert patient.get(f"{server.url}/learning").json()["replay_after"] is None
        loop.status = replace(loop.status, replay_before=2.0, replay_after=2.25)  # as with learning.replay
        yield server


def test_the_numbers_are_the_same_everywhere(learnt: Server) -> None:
    status = status_of(learnt)
    now, told = learnt.metrics(), patient.get(f"{learnt.url}/learning").json()
    assert (status.tau_before, status.tau_after) in itertools.pairwise(tau for _, tau, _ in status.history)
    for name, field in NAMES.items():
        assert now[f"headway_learning_{name}"] == now[f"vllm:learning_{name}"] == getattr(status, field), name
        assert told[field] == getattr(status, field), name
    assert told["history"] == [list(point) for point in status.history]
    (card,) = patient.get(f"{learnt.url}/v1/models").json()["data"]
    assert card["learns"] is True


def test_the_page_shows_them_beside_a_line(learnt: Server, browser: Browser) -> None:  # noqa: F811
    problems, status = list[str](), status_of(learnt)
    page = open_page(learnt, browser, PHONE, problems)
    line = rf"^Learnt, its process has ended: τ {status.tau:.2f}, {status.taken_over} heads? taken over$"
    expect(page.locator("#learning summary")).to_have_text(re.compile(line))
    page.locator("#learning summary").click()
    gain = f"{status.tau_before:.2f} → {status.tau_after:.2f}"
    expected = {"tau": f"{status.tau:.2f}", "gain": gain, "replay": "2.00 → 2.25", "updates": f"{status.updates:,}"}
    assert {name: page.locator(f"#learning [data-is={name}]").text_content() for name in expected} == expected
    plot = page.locator("#learning svg")
    assert plot.locator("circle").count() == len({taken for *_, taken in status.history} - {0})
    words = rf"τ from [\d.]+ to {status.tau:.2f}, \d+ times a head was taken over"
    assert re.fullmatch(words, plot.get_attribute("aria-label") or "")
    points = (plot.locator("polyline").get_attribute("points") or "").split(" ")
    assert len(points) == len(status.history)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE[0]
    assert problems == []
    page.close()


def test_without_learning_nothing_is_said_about_it(server: Server, browser: Browser) -> None:  # noqa: F811
    assert not [name for name in server.metrics() if "learning" in name]
    response = patient.get(f"{server.url}/learning")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_learning")
    assert "learns" not in patient.get(f"{server.url}/v1/models").json()["data"][0]
    page = open_page(server, browser, PHONE, [])
    expect(page.locator("#learning")).to_be_hidden()
    page.close()
