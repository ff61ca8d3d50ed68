"""The page at `/` in Chromium with a real server, used as a person would."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from infer.server.playground import page as the_page
from tests.server import patient
from tests.server.harness import MakeServer, Server, slow_down

DESKTOP, PHONE = (1280, 900), (390, 844)
PATIENCE_MS = 240_000  # for expectations and actions; Playwright's defaults are 5 and 30 seconds
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_it_needs_nothing_from_elsewhere(server: Server) -> None:
    response = patient.get(f"{server.url}/")
    assert response.headers["content-type"].startswith("text/html")
    assert response.text == the_page().html
    addresses = set(re.findall(r"https?://[^\s\"'`]+", response.text)) - {"http://www.w3.org/2000/svg"}  # a namespace
    assert addresses == set()
    assert not re.search(
        r"<(?:script|img|iframe)[^>]* src=|<link[^>]*stylesheet|@import|innerHTML|eval\(", response.text
    )
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_MS)
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE_MS)
        yield running
        running.close()


def open_page(server: Server, browser: Browser, size: tuple[int, int], problems: list[str]) -> Page:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#model")).to_contain_text("proposer ")
    return page


def open_chat(server: Server, browser: Browser, size: tuple[int, int] = DESKTOP, **fields: str) -> Page:
    page = open_page(server, browser, size, [])
    fill_settings(page, temperature="0", max_tokens="40", **fields)
    return page


def fill_settings(page: Page, **fields: str) -> None:
    page.locator("#settings").evaluate("settings => { settings.open = true; }")
    for field, value in fields.items():
        page.fill(f"#{field}", value)


def send(page: Page, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def expect_done(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("Done")
    expect(page.locator("#composer .start")).to_be_visible()


def bodies_of(page: Page) -> list[Any]:
    """Return a list that receives the body of each POST request that the page sends from now on."""
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    return bodies


def test_a_conversation(server: Server, browser: Browser) -> None:
    """By keyboard alone, on a phone: requests carry the earlier turns, and a reload keeps the conversation."""
    problems: list[str] = []
    page = open_page(server, browser, PHONE, problems)
    fill_settings(page, temperature="0", max_tokens="40", seed="7")
    page.locator("#settings").evaluate("settings => { settings.open = false; }")
    page.press("#system-box summary", "Enter")
    page.fill("#system", "be brief")
    bodies = bodies_of(page)
    page.focus("#message")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect_done(page)
    assert page.locator("#message").input_value() == ""
    assert page.evaluate("document.activeElement.id") == "message"
    first = bodies[0]["messages"]
    assert first == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one\ntwo"}]
    assert (bodies[0]["temperature"], bodies[0]["max_tokens"], bodies[0]["seed"]) == (0, 40, 7)
    figures = page.locator(".figures").text_content() or ""
    assert re.match(r"τ \d\.\d\d · [\d.]+ tokens/s · 40 tokens · seed 7 · cut", figures)
    completion = server.post("/v1/chat/completions", {**bodies[0], "stream": False, "stream_options": None}).json()
    text = completion["choices"][0]["message"]["content"]
    send(page, "three")
    expect(page.locator(".turn")).to_have_count(4)
    expect_done(page)
    assert bodies[1]["messages"] == [
        *first,
        {"role": "assistant", "content": text},
        {"role": "user", "content": "three"},
    ]
    assert page.locator("#announcer").text_content()
    page.fill("#message", "not sent yet")
    shown = page.locator("#turns").text_content()
    page.reload()
    expect(page.locator("#model")).to_contain_text("proposer ")
    assert page.locator("#turns").text_content() == shown
    assert [page.locator(f"#{name}").input_value() for name in ("message", "system", "seed")] == [
        "not sent yet",
        "be brief",
        "7",
    ]
    assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE[0]
    assert problems == []
    page.close()


def test_the_last_exchange_can_be_changed(server: Server, browser: Browser) -> None:
    """It can be edited, regenerated, deleted and restored; the text in the composer is kept."""
    page = open_chat(server, browser)
    send(page, "one")
    expect_done(page)
    send(page, "two")
    expect(page.locator(".turn")).to_have_count(4)
    expect_done(page)
    page.fill("#message", "a draft")
    bodies = bodies_of(page)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("another")
    page.keyboard.press("Escape")
    assert page.locator(".prompt .body").all_text_contents() == ["one", "two"]
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("three")
    page.keyboard.press("Enter")
    expect(page.locator(".prompt .body").last).to_have_text("three")
    expect_done(page)
    page.get_by_role("button", name="Regenerate").click()
    expect_done(page)
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    assert [[m["content"] for m in body["messages"] if m["role"] == "user"] for body in bodies] == [
        ["one", "three"]
    ] * 2
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".turn")).to_have_count(4)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".turn")).to_have_count(4)
    assert page.locator("#message").input_value() == "a draft"
    page.close()


def check_names_and_tints(page: Page) -> None:
    """Check that every control has a name, that news are announced, and that tints of drafts can be put out."""
    named = "controls => controls.filter(c => !c.labels?.length && !c.textContent.trim()).map(c => c.id)"
    assert page.eval_on_selector_all("input, select, textarea, button", named) == []
    assert page.locator("#status").get_attribute("aria-live") == "polite"
    assert page.locator("#announcer").get_attribute("aria-live") == "polite"
    assert not (page.locator(".figures").text_content() or "").startswith("τ 1.00")
    color = "node => getComputedStyle(node).backgroundColor"
    assert page.locator(".answer .d1").first.evaluate(color) != "rgba(0, 0, 0, 0)"
    page.uncheck("#tint")
    assert page.locator(".answer .d1").first.evaluate(color) == "rgba(0, 0, 0, 0)"


def test_what_goes_wrong_is_shown_at_the_turn(server: Server, browser: Browser) -> None:
    """Server unreachable, connection lost, key missing, output too long: each can be retried, and no prompt is lost."""
    page = open_chat(server, browser)
    address, retry = "**/v1/chat/completions", page.get_by_role("button", name="Retry")
    page.route(address, lambda route: route.abort())
    send(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("the server cannot be reached")
    page.unroute(address)
    event = json.dumps({"choices": [{"delta": {"content": "half an"}}]})
    page.route(address, lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {event}\n\n"))
    retry.click()
    expect(page.get_by_role("alert")).to_contain_text("the connection ended before the answer did")
    expect(page.locator(".written")).to_have_text("half an")
    page.unroute(address)
    error = {"error": {"message": "this server needs an API key"}}
    page.route(
        address,
        lambda route: (
            route.continue_()
            if route.request.headers.get("authorization") == "Bearer secret"
            else route.fulfill(status=401, json=error)
        ),
    )
    retry.click()
    expect(page.get_by_role("alert")).to_contain_text("this server needs an API key (401)")
    page.get_by_label("API key").fill("secret")
    retry.click()
    expect_done(page)
    assert "secret" not in page.evaluate("JSON.stringify({ ...sessionStorage })")
    check_names_and_tints(page)
    fill_settings(page, max_tokens="100000")
    send(page, "and now")
    expect(page.get_by_role("alert")).to_contain_text("prompt and answer together")
    fill_settings(page, max_tokens="40")
    retry.click()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect_done(page)
    assert page.locator(".prompt .body").all_text_contents() == ["hello", "and now"]
    page.close()


def test_an_answer_can_be_stopped_and_scrolling_is_left_to_the_user(
    make_server: MakeServer, tiny_target_folder: Path, browser: Browser
) -> None:
    with make_server(target=tiny_target_folder, proposer="none") as server:
        page = open_chat(server, browser, (390, 500))
        page.locator("#settings").evaluate("settings => { settings.open = false; }")
        fill = "node => node.scrollHeight - node.clientHeight"
        send(page, "line\n" * 30)
        expect_done(page)
        turns = page.locator("#turns")
        assert turns.evaluate(f"node => ({fill})(node) - node.scrollTop") < 2
        page.locator("#max_tokens").evaluate("field => { field.value = 200; }")
        slow_down(server, 0.2)
        send(page, "go on")
        expect(page.locator(".live .figures")).to_contain_text("tokens/s")
        turns.evaluate("node => { node.scrollTop = 40; }")
        expect(page.locator("#latest")).to_be_visible()
        count = page.locator(".live .figures").text_content()
        expect(page.locator(".live .figures")).not_to_have_text(count or "")
        assert turns.evaluate("node => node.scrollTop") == 40
        page.press("#message", "Escape")
        expect(page.locator("#status")).to_have_text("Stopped")
        expect(page.locator(".figures").last).to_contain_text("stopped")
        assert turns.evaluate("node => node.scrollTop") == 40
        page.click("#latest")
        assert turns.evaluate(f"node => ({fill})(node) - node.scrollTop") < 2
        page.close()


def test_what_a_model_writes_is_text(server: Server, browser: Browser) -> None:
    problems: list[str] = []
    page = open_page(server, browser, PHONE, problems)
    written = "<img src=x onerror=alert(1)>\n\n```html\n" + "<b>wide</b> " * 60 + "\n```\n- **one** `two`\n" + "w" * 300
    event = json.dumps({"choices": [{"delta": {"content": written}, "finish_reason": "stop"}]})
    body = f"data: {event}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    send(page, "<i>hello</i>")
    expect_done(page)
    assert page.locator(".turn").locator("img, b, i").count() == 0
    assert page.locator(".prompt .body").text_content() == "<i>hello</i>"
    assert (page.locator(".code code").text_content() or "").startswith("<b>wide</b>")
    assert page.locator("li strong").text_content() == "one"
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert problems == []
    page.close()


def test_speculation_on_and_off_side_by_side(server: Server, browser: Browser) -> None:
    """By keyboard alone: both runs of a pair give the same text, drafts are tinted, counters fit the requests."""
    problems: list[str] = []
    page = open_page(server, browser, DESKTOP, problems)
    fill_settings(page, temperature="0", max_tokens="60", seed="7")
    page.focus("input[value=completion]")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#compare")).to_be_visible()
    page.fill("#pairs", "3")
    page.focus("#compared")
    page.keyboard.press("Control+a")
    page.keyboard.type("x = 1 " * 8)
    bodies = bodies_of(page)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_have_text("Done, 3 pairs")
    expect(page.locator("#verdict")).to_have_text(VERDICT)
    expect(page.locator("#evidence")).to_have_text(EVIDENCE)
    enabled = [body["speculative"].get("enabled", True) for body in bodies]
    assert enabled == [False, True, *(False, True), *(True, False), *(False, True)]
    assert [body["max_tokens"] for body in bodies] == [16, 16, *[60] * 6]
    assert {body["seed"] for body in bodies} == {7}
    assert all(body["messages"] == [{"role": "user", "content": "x = 1 " * 8}] for body in bodies)
    assert len({body["cache_salt"] for body in bodies}) == 8  # no request hits another's prefix in the cache
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
    assert page.evaluate("() => document.documentElement.scrollWidth") <= DESKTOP[0]
    assert problems == []
    page.close()


VERDICT = re.compile(
    r"^(\d+\.\d\d× as fast|Slower: \d+\.\d\d× the speed without drafts|No difference: \d+\.\d\d×, within the noise of "
    r"\d+ %|Nothing was drafted: it would not have paid \(\d+\.\d\d×\))$"
)
EVIDENCE = re.compile(
    r"^Same text: yes, 60 tokens · median ratio of 3 pairs \d+\.\d\d, \d+\.\d\d to \d+\.\d\d · seed 7$"
)


def test_a_model_without_a_template_has_a_completion_box(
    make_server: MakeServer, tiny_target_folder: Path, tmp_path: Path, browser: Browser
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    (folder / "chat_template.jinja").unlink()
    with make_server(target=folder, proposer="ngram") as server:
        complete(open_page(server, browser, DESKTOP, []), seed_that_returns_the_carriage(server))


def seed_that_returns_the_carriage(server: Server) -> str:
    """Return the first seed with which `complete` gets a carriage return, which a text area makes a line feed."""
    for seed in range(1000):
        answer = server.complete(max_tokens=20, temperature=2, seed=seed).json()
        if "\r" in answer["choices"][0]["text"]:
            return str(seed)
    raise AssertionError("no text of this target has a carriage return")


def complete(page: Page, seed: str) -> None:
    """Check that a completion can be stopped and continued with its text unchanged, and that an error is shown."""
    expect(page.locator("input[value=chat]")).to_be_hidden()
    expect(page.locator("#completion")).to_be_visible()
    fill_settings(page, max_tokens="20", temperature="2")
    held_routes: list[Route] = []  # or so small a target would finish before it can be stopped
    page.route("**/v1/completions", lambda route: held_routes.append(route))
    page.click("#completion-form .start")
    expect(page.locator("#completion-form .stop")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped")
    page.unroute("**/v1/completions")
    fill_settings(page, seed=seed)
    page.fill("#prompt", "def f(")
    page.press("#prompt", "Control+Enter")
    expect(page.locator("#completed .figures")).to_contain_text("· seed ")  # complete; its length depends on the seed
    bodies = bodies_of(page)
    text = page.locator("#completed .text").text_content() or ""
    assert "\r" in text
    page.get_by_role("button", name="Go on from here").click()
    expect(page.locator("#status")).to_have_text("Done")
    assert bodies[0]["prompt"] == "def f(" + text
    fill_settings(page, max_tokens="100000")
    page.click("#completion-form .start")
    expect(page.get_by_role("alert")).to_contain_text("prompt and answer together")
    page.close()
