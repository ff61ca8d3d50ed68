"""The page at `/`, in Chromium with a real server: what a person sees and does there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from infer.server.playground import page as the_page
from tests.server.harness import Server

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_it_needs_nothing_from_elsewhere(server: Server) -> None:
    answer = httpx.get(f"{server.url}/")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.text == the_page().html
    addresses = set(re.findall(r"https?://[^\s\"'`]+", answer.text)) - {"http://www.w3.org/2000/svg"}  # a name
    assert addresses == set()
    assert not re.search(r"<(?:script|img|iframe)[^>]* src=|<link[^>]*stylesheet|@import|innerHTML|eval\(", answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "no Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_speculation_on_and_off_side_by_side(server: Server, browser: Browser, size: tuple[int, int]) -> None:
    """By keyboard alone: the same text twice, drafts tinted, counters that fit the server's own."""
    problems: list[str] = []
    page = open_page(server, browser, size, problems)
    page.focus("#prompt")
    page.keyboard.press("Control+a")
    page.keyboard.type("x = 1 " * 8)
    for field, value in (("temperature", "0"), ("max_tokens", "60"), ("seed", "7")):
        page.fill(f"#{field}", value)
    page.focus("#compare")
    page.keyboard.press("Space")
    expect(page.locator("#compare")).not_to_be_checked()
    page.keyboard.press("Space")
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("done: the same text, 60 tokens, seed 7", timeout=120_000)
    expect(page.locator("#verdict")).to_have_text(VERDICT)
    assert [body["speculative"].get("enabled", True) for body in bodies] == [False, True, False, True, True, False]
    assert [body["max_tokens"] for body in bodies] == [16, 16, 60, 60, 60, 60]
    assert {body["seed"] for body in bodies} == {7}
    assert len({body["cache_salt"] for body in bodies}) == 6  # none finds what another left in the server's caches
    clocks = page.locator("#clocks dd").all_text_contents()
    assert clocks == [
        f"{page.locator('.run').nth(index).locator('[data-is=clock]').text_content()} s" for index in (0, 1)
    ]
    off, on = page.locator(".run").all()
    texts = [run.locator(".text").text_content() for run in (off, on)]
    assert texts[0] == texts[1]
    assert texts[0]
    assert off.locator(".d1").count() == 0
    assert on.locator(".d1").count() > 0
    assert off.locator("[data-is=tau]").text_content() == "1.00"
    assert float(on.locator("[data-is=tau]").text_content() or 0) > 1
    assert re.match(r"1: \d+%", on.locator(".bars").get_attribute("aria-label") or "")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= size[0]
    assert problems == []
    page.close()


VERDICT = re.compile(
    r"^(\d+\.\d\d× as fast, |Slower: \d+\.\d\d× the speed without, |No difference: \d+\.\d\d×, within the noise of "
    r"\d+ %, |Nothing was drafted: it would not have paid \(\d+\.\d\d×, )the same 60 tokens\)?$"
)
REPORTED = ([74.9, 74.9], [66.6, 66.6])  # tokens/s; the first token had come after 0.54 s and 0.08 s


@pytest.mark.parametrize(
    ("off", "on", "text"),
    [
        (*REPORTED, "Slower: 0.89× the speed without, the same 61 tokens"),
        ([50, 52], [100, 98], "1.94× as fast, the same 61 tokens"),
        ([100, 100], [101, 101], "No difference: 1.01×, within the noise of 3 %, the same 61 tokens"),
        ([100, 100], [97.5, 97.5], "No difference: 0.97×, within the noise of 3 %, the same 61 tokens"),
        ([100, 100], [96, 96], "Slower: 0.96× the speed without, the same 61 tokens"),
        ([100, 100], [104, 104], "1.04× as fast, the same 61 tokens"),
        ([80, 125], [105, 110], "No difference: 1.07×, within the noise of 28 %, the same 61 tokens"),
        ([100, 100], [100, 100], "No difference: 1.00×, within the noise of 3 %, the same 61 tokens"),
    ],
)
def test_the_verdict_follows_from_the_speeds(browser: Browser, off: list[float], on: list[float], text: str) -> None:
    assert judged(browser, off, on) == text


def test_the_verdict_of_what_cannot_be_compared(browser: Browser) -> None:
    assert judged(browser, [100, 100], [101, 101], drafted=0) == (
        "Nothing was drafted: it would not have paid (1.01×, the same 61 tokens)"
    )
    assert judged(browser, [100, 100], [80, 80], drafted=0).startswith("Slower: 0.80×")
    assert judged(browser, [100, 100], [200, 200], texts="ab") == "The texts differ"
    assert judged(browser, [100, 100], [200, 200], decoded=0) == "Too few tokens to compare"


def judged(
    browser: Browser, off: list[float], on: list[float], *, drafted: int = 40, texts: str = "aa", decoded: int = 60
) -> str:
    """The page's own function, on reads of these speeds."""
    page = browser.new_page()
    page.set_content(the_page().html)
    reads = [
        [
            {"text": text, "tokens": 61, "decoded": decoded, "seconds": 60 / speed, "drafted": count, "firstAt": 0.1}
            for speed in speeds
        ]
        for speeds, text, count in ((off, texts[0], 0), (on, texts[1], drafted))
    ]
    text = page.evaluate("([off, on]) => verdict(off, on)", reads)
    page.close()
    return text


def test_every_control_has_a_name(server: Server, browser: Browser) -> None:
    page = open_page(server, browser, (1280, 900), [])
    named = "controls => controls.filter(c => !c.labels?.length && !c.textContent.trim()).map(c => c.id)"
    assert page.eval_on_selector_all("input, select, textarea, button", named) == []
    assert page.locator("#status").get_attribute("aria-live") == "polite"
    page.close()


def test_a_completion_can_be_stopped_and_a_mistake_is_shown(server: Server, browser: Browser) -> None:
    page = open_page(server, browser, (1280, 900), [])
    page.check("input[value=completion]")
    expect(page.locator("#system-field")).to_be_hidden()
    page.fill("#max_tokens", "480")
    page.fill("#temperature", "2")
    held: list[Route] = []  # so small a target would have answered before anyone could stop it
    page.route("**/v1/completions", lambda route: held.append(route))
    page.click("#run")
    expect(page.locator("#cancel")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text(re.compile("stopped"))
    page.unroute("**/v1/completions")
    page.fill("#max_tokens", "100000")
    page.click("#run")
    expect(page.locator("#status")).to_contain_text("prompt and answer together")
    page.close()


def open_page(server: Server, browser: Browser, size: tuple[int, int], problems: list[str]) -> Page:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#model")).to_contain_text("proposer head")
    return page
