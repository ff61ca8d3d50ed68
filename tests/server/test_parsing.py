"""Tool calls and reasoning are parsed from a text however it is split into pieces; everything else stays content."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.server.parsing.stream import ChatParser, Parts
from infer.server.parsing.style_choice import style_of
from infer.server.parsing.tool_styles import STYLES, Call

TOOLS = ["weather", "add"]
PARIS = Call("weather", '{"city": "Paris </tool_call> {[\\"\\\\"}')
SUM = Call("add", '{"a": 1, "b": [2, {"c": null}]}')
# style, text -> content ("=" for the whole text), calls
CASES: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", "plain < text > <tool", "plain < text > <tool", []),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS.arguments}}}\n</tool_call>', "", [PARIS]),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "add", "arguments": {SUM.arguments}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {PARIS.arguments}, "name": "weather"}}</tool_call>\n',
        "Let me see.\n",
        [SUM, PARIS],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call> done', " done", [Call("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": add}</tool_call>', "=", []),
    ("hermes", "<tool_call>x", "=", []),
    ("hermes", '<tool_call>{"name": ["add"]}', "=", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": -Infinity}}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>', "=", []),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 2000}{"]" * 2000}}}}}</tool_call>', "=", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [Call("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": ""}</tool_call>', "", [Call("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add"}</tool_', "", [Call("add", "{}")]),
    (
        "hermes",
        r'<tool_call>{"name": "add", "arguments": "{\"a\": \"\\ud83d \ud83d\"}"}</tool_call>',
        "",
        [Call("add", '{"a": "\\ufffd \ufffd"}')],
    ),
    (
        "hermes",
        rf'<tool_call>{{"name": "add", "arguments": {{"a":1e999, "b" : "\ud83d", "c": {"1" * 5000}}}}}</tool_call>',
        "",
        [Call("add", rf'{{"a":1e999, "b" : "\ufffd", "c": {"1" * 5000}}}')],
    ),
    ("llama3", f'{{"name": "add", "parameters": {SUM.arguments}}}', "", [SUM]),
    ("llama3", f'<|python_tag|>{{"name": "add", "parameters": {SUM.arguments}}}', "", [SUM]),
    (
        "llama3",
        f'\n{{"name": "add", "parameters": {SUM.arguments}}}; {{"name": "weather", "parameters": {PARIS.arguments}}}',
        "",
        [SUM, PARIS],
    ),
    ("llama3", ' {"answer": 42}', "=", []),
    ("llama3", '{"name": "add", "parameters": {', "=", []),
    ("llama3", "<|python_tag|>print(1)", "=", []),
    ("llama3", '{"name": "add"}; then', "; then", [Call("add", "{}")]),
    ("llama3", '{"name": "add"}; {"a": 1}', '; {"a": 1}', [Call("add", "{}")]),
    ("llama3", '{"name": "add"} ; <|python_tag|>{"name": "add"};', "", [Call("add", "{}")] * 2),
    (
        "llama3",
        '{"name": "add", "parameters": {}}\n{"name": "weather", "parameters": {}}',
        "",
        [Call("add", "{}"), Call("weather", "{}")],
    ),
    ("llama3", '{"name": "add"} {"a": 1}', ' {"a": 1}', [Call("add", "{}")]),
    ("llama3", '{"name": "add"}\n<|python_tag|>{"name": "add"}\nDone.', "\nDone.", [Call("add", "{}")] * 2),
    ("llama3", 'The JSON is {"name": "add", "parameters": {}}', "=", []),
    ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {SUM.arguments}}}]', "", [SUM]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {SUM.arguments}}}, '
        f'{{"name": "weather", "arguments": {PARIS.arguments}}}]',
        "",
        [SUM, PARIS],
    ),
    (
        "mistral",
        f"Yes.[TOOL_CALLS]add[ARGS]{SUM.arguments}[TOOL_CALLS]weather{PARIS.arguments}",
        "Yes.",
        [SUM, PARIS],
    ),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}", "=", []),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": NaN}', "=", []),
    ("mistral", r'[TOOL_CALLS]add {"a": "\ud83d"}', "", [Call("add", r'{"a": "\ufffd"}')]),
    ("mistral", '[TOOL_CALLS][{"name": "add"}, {"name": "rm"}]', "=", []),
    ("mistral", "[TOOL_CALLS", "=", []),
]


def pieces(text: str, cuts: list[int]) -> list[str]:
    positions = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(positions)]


def parse(parser: ChatParser, chunks: list[str]) -> Parts:
    parts = Parts()
    for chunk in chunks:
        parts.items += parser.take(chunk, None).items
    parts.items += parser.take("", "stop").items
    return parts


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=60))
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1][:30]!r}")
def test_calls_are_found_however_the_text_comes(case: Any, cuts: list[int]) -> None:
    style, text, content, calls = case
    parts = parse(ChatParser(STYLES[style], TOOLS), pieces(text, cuts))
    assert parts.content == (text if content == "=" else content)
    assert parts.calls == calls
    assert parse(ChatParser(STYLES[style], []), pieces(text, cuts)).content == text  # no tools, no calls


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 100), max_size=30))
@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nHm < </think\n</think>\n\nYes.", False, "\nHm < </think\n", "Yes."),
        ("\n<think></think>Yes.", False, "", "Yes."),
        ("Hm.</think>\nYes </think>", True, "Hm.", "Yes </think>"),
        ("Hm, and never done", True, "Hm, and never done", ""),
        ("Yes <think>", False, "", "Yes <think>"),
        ("<thin", False, "", "<thin"),
    ],
)
def test_reasoning_is_set_apart(text: str, inside: bool, reasoning: str, content: str, cuts: list[int]) -> None:
    parts = parse(ChatParser(None, [], thinking=True, inside=inside), pieces(text, cuts))
    assert (parts.reasoning, parts.content) == (reasoning, content)
    assert parse(ChatParser(None, []), pieces(text, cuts)).content == text


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 100), max_size=30))
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<think>Hm.</think><response>It is <3.</response>", "It is <3."),
        ("<think>Hm.</think>\n\n<response>\nYes.</response>\n", "\nYes.\n"),
        ("<think>Hm.</think><response>It is", "It is"),
        ("<think>Hm.</think>It is <response>3</response>", "It is <response>3</response>"),
        ("<think>Hm.</think><resp", "<resp"),
    ],
)
def test_an_answer_between_marks_of_its_own(text: str, content: str, cuts: list[int]) -> None:
    """Granite 3.3 with thinking=true."""
    for tools in ([], TOOLS):
        parts = parse(ChatParser(STYLES["granite"], tools, thinking=True, wrapped=True), pieces(text, cuts))
        assert (parts.reasoning, parts.content) == ("Hm.", content)
    answer = text.removeprefix("<think>Hm.</think>")
    assert parse(ChatParser(None, [], thinking=True, wrapped=True), pieces(answer, cuts)).content == answer


@pytest.mark.parametrize("text", ["\n\nYes.", " ", "\n", "\t\n no"])
def test_where_nothing_can_open_every_piece_is_shown_at_once(text: str) -> None:
    """Neither tools nor reasoning: an answer that begins with white space is streamed from its first token."""
    parser = ChatParser(None, [])
    assert [parser.take(piece, None).content for piece in text] == list(text)
    held = ChatParser(None, [], thinking=True, inside=True)
    assert [held.take(piece, None).content for piece in ("Hm.</think>", "\n", "\n", " ", "a")] == ["", "", "", " ", "a"]


def test_reasoning_before_a_call() -> None:
    text = 'Hm.</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for size in (1, 2, 7, 100):
        parser = ChatParser(STYLES["hermes"], TOOLS, thinking=True, inside=True)
        parts = parse(parser, [text[start : start + size] for start in range(0, len(text), size)])
        assert (parts.reasoning, parts.content, parts.calls) == ("Hm.", "", [Call("add", "{}")])


def test_a_long_call_is_read_once() -> None:
    """Parsing a call that arrives in single characters takes time linear in its length, within a small factor."""
    text = '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 40_000 + '"}}</tool_call>'
    began = time.process_time()
    parts = parse(ChatParser(STYLES["hermes"], TOOLS), list(text))
    assert len(parts.calls) == 1
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{% if tools is not none %}{'name': x, \"parameters\": y}{% endif %}<|python_tag|>", "llama3"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_style_shows_in_the_template(template: str | None, name: str | None) -> None:
    style = style_of(template)
    assert (style and style.name) == name
