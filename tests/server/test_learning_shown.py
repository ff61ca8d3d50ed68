"""What a server says of how its head learns: on /metrics, at /learning and on the page."""

from __future__ import annotations

import itertools
import os
import re
import signal

from playwright.sync_api import Browser, expect

from infer.learning.status import LearningStatus
from tests.server import patient
from tests.server.harness import MakeServer, Server, wait_until
from tests.server.test_learning import EAGER, learning_of, status_of
from tests.server.test_playground import SIZES, browser, open_page  # noqa: F401

NAMES = {
    "heads_taken_over_total": "taken_over",
    "heads_refused_total": "refused",
    "examples_total": "examples",
    "examples_dropped_total": "dropped",
    "updates_total": "updates",
    "seconds_total": "seconds",
    "buffered_tokens": "buffered",
    "acceptance_length": "tau",
    "running": "running",
}


def serve_until_it_learnt(server: Server) -> LearningStatus:
    """Answer requests until a head was taken over, then end the process, so that no number changes any more."""
    for seed in range(400):
        body = {"prompt": ["x = 1\n", "def f("][seed % 2] + str(seed % 10), "max_tokens": 32, "seed": seed % 20}
        server.complete(**body, temperature=0.4 * (seed % 2), ignore_eos=True)
        if status_of(server).tau == status_of(server).tau_after:
            break
    os.kill(learning_of(server)._trainer.pid, signal.SIGTERM)
    wait_until(lambda: not status_of(server).running)
    status = status_of(server)
    assert status.taken_over > 0
    return status


@SIZES
def test_a_head_that_learns_is_shown(make_server: MakeServer, browser: Browser, size: tuple[int, int]) -> None:  # noqa: F811
    """The same numbers everywhere; on the page beside a line of τ over time."""
    problems: list[str] = []
    with make_server(learning=EAGER) as server:
        assert patient.get(f"{server.url}/learning").json()["tau"] is None
        assert "headway_learning_acceptance_length" not in server.metrics()
        page = open_page(server, browser, size, problems)
        expect(page.locator("#learning summary")).to_have_text("Learning: not judged yet, 0 heads taken over")
        status = serve_until_it_learnt(server)
        now, told = server.metrics(), patient.get(f"{server.url}/learning").json()
        taus = [tau for _, tau, _ in status.history]
        assert (status.tau_before, status.tau_after) in itertools.pairwise(taus)
        for name, field in NAMES.items():
            assert now[f"headway_learning_{name}"] == now[f"vllm:learning_{name}"] == getattr(status, field), name
            assert told[field] == getattr(status, field), name
        assert told["history"] == [list(point) for point in status.history]
        (card,) = patient.get(f"{server.url}/v1/models").json()["data"]
        assert card["learns"] is True
        line = rf"^Learnt, its process has ended: τ {status.tau:.2f}, {status.taken_over} heads? taken over$"
        expect(page.locator("#learning summary")).to_have_text(re.compile(line))
        page.locator("#learning summary").click()
        shown = {
            name: page.locator(f"#learning [data-is={name}]").text_content() for name in ("tau", "gain", "updates")
        }
        gain = f"{status.tau_before:.2f} → {status.tau_after:.2f}"
        assert shown == {"tau": f"{status.tau:.2f}", "gain": gain, "updates": f"{status.updates:,}"}
        plot = page.locator("#learning svg")
        assert plot.locator("circle").count() == len({taken for *_, taken in status.history} - {0})
        words = rf"τ from [\d.]+ to {status.tau:.2f}, \d+ times a head was taken over"
        assert re.fullmatch(words, plot.get_attribute("aria-label") or "")
        points = (plot.locator("polyline").get_attribute("points") or "").split(" ")
        assert len(points) == len(status.history)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= size[0]
        assert problems == []
        page.close()


def test_without_learning_nothing_is_said_about_it(server: Server, browser: Browser) -> None:  # noqa: F811
    assert not [name for name in server.metrics() if "learning" in name]
    response = patient.get(f"{server.url}/learning")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_learning")
    assert "learns" not in patient.get(f"{server.url}/v1/models").json()["data"][0]
    page = open_page(server, browser, (1280, 900), [])
    expect(page.locator("#learning")).to_be_hidden()
    page.close()
