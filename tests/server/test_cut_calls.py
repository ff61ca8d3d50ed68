"""Calls truncated by the end of the output are calls, never content; a streamed text is parsed like a complete one."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.server.parsing.stream import ChatParser, Parts
from infer.server.parsing.tool_styles import STYLES, Call
from models.json_text import read

TOOLS = ["add", "add_all", "weather"]
PAYLOAD = {"a": 1, "b": {"c": 'x </tool_call> "\\ \U0001f600'}}
ARGUMENTS = json.dumps(PAYLOAD, ensure_ascii=False)
# style -> a text with two calls, and its content
TEXTS = {
    "hermes": (
        f'I add.\n<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"arguments": {ARGUMENTS}, "name": "add_all"}}\n</tool_call>',
        "I add.\n",
    ),
    "llama3": (
        f'{{"name": "add", "parameters": {ARGUMENTS}}}; {{"type": "function", "name": "add_all", '
        f'"parameters": {ARGUMENTS}}}',
        "",
    ),
    "mistral": (
        f'I add.[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}}}, '
        f'{{"name": "add_all", "arguments": {ARGUMENTS}}}]',
        "I add.",
    ),
    "mistral named": (f"I add.[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]add_all {ARGUMENTS}", "I add."),
}


def style_of(case: str) -> Any:
    return STYLES[case.partition(" ")[0]]


def parse(parser: ChatParser, chunks: list[str], *, cut: bool) -> Parts:
    parts = Parts()
    for chunk in chunks:
        parts.items += parser.take(chunk, None).items
    parts.items += parser.take("", "length" if cut else "stop").items
    return parts


def in_order(parts: Parts) -> list[Any]:
    """Return calls and text in order, with adjacent text of one kind merged."""
    merged: list[Any] = []
    for item in parts.items:
        if isinstance(item, Call):
            merged.append(item)
        elif merged and not isinstance(merged[-1], Call) and merged[-1][0] == item.kind:
            merged[-1] = (item.kind, merged[-1][1] + item.text)
        else:
            merged.append((item.kind, item.text))
    return merged


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("case", TEXTS)
def test_wherever_it_is_cut_no_markup_is_content(case: str, forced: bool) -> None:
    text, content = TEXTS[case]
    style = style_of(case)
    complete = parse(ChatParser(style, TOOLS), [text], cut=False).calls
    assert [call.name for call in complete] == ["add", "add_all"]
    begins = [position for position in range(len(text)) if text.startswith(style.begins[0], position)] or [0]
    prefixes = set()
    for end in range(len(text) + 1):
        parts = ChatParser(style, TOOLS, forced=forced).take(text[:end], "length")
        if forced:
            assert parts.content == ""
        elif end < begins[0] + len(style.begins[0]) and not style.bare:
            assert parts.content == text[:end]
        elif all(
            not begin < end < begin + len(style.begins[0]) for begin in begins
        ):  # a partial marker is not a marker
            assert parts.content == content
        finished, (last,) = parts.calls[:-1], parts.calls[-1:] or [None]
        assert finished == complete[: len(finished)]
        if last is not None:
            expected = complete[len(finished)]
            assert last.name == expected.name
            assert expected.arguments.startswith(last.arguments)
            assert last.complete == (last.arguments == expected.arguments)
            prefixes.add((len(finished), last.arguments))
    assert {(0, ""), (0, ARGUMENTS[:5]), (0, ARGUMENTS), (1, ARGUMENTS)} <= prefixes


@pytest.mark.parametrize("case", TEXTS)
def test_an_answer_that_ends_by_itself_in_a_call_is_text(case: str) -> None:
    text, _ = TEXTS[case]
    end = text.index('{"a"') + 9
    parts = ChatParser(style_of(case), TOOLS).take(text[:end], "stop")
    assert (parts.content, parts.calls) == (text[:end], [])


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", '<tool_call>{"name": "rm", "arguments": {"a'),
        ("hermes", '<tool_call>{"name": "ro'),
        ("hermes", '<tool_call>{"name": 5'),
        ("hermes", "<tool_call>ad"),
        ("hermes", '<tool_call>{"city": "Paris", "na'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}'),
        ("hermes", "a < b and <tool_ca"),
        ("llama3", '{"answer": 4'),
        ("llama3", "<|python_tag|>print("),
        ("mistral", "[TOOL_CALLS]rm[ARGS]{"),
        ("mistral", "[TOOL_CALLS]add[1"),
        ("mistral", '[TOOL_CALLS][{"name": "rm"}, {"name": "ad'),
    ],
)
def test_what_cannot_become_a_call_is_text_though_it_was_cut(style: str, text: str) -> None:
    parts = ChatParser(STYLES[style], TOOLS).take(text, "length")
    assert (parts.content, parts.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "add", "arguments": "', ""),
        (r'{"name": "add", "arguments": "{\"a\": \"x', '{"a": "x'),
        (r'{"name": "add", "arguments": "{\"a\": \"\u00e', '{"a": "'),
        (r'{"name": "add", "arguments": "{\"a\": 1}"', '{"a": 1}'),
        (r'{"name": "add", "arguments": {"a": "\ud83d', r'{"a": "\ufffd'),
        ('{"name": "add", "arguments": nul', ""),
        ('{"name": "add", "arguments": null', ""),
        ('{"name": "add", "parameters": {"x": 1}, "arguments": {"a', '{"a'),
    ],
)
def test_arguments_that_break_off(text: str, arguments: str) -> None:
    (call,) = ChatParser(STYLES["hermes"], TOOLS).take(f"<tool_call>{text}", "length").calls
    assert call == Call("add", arguments, complete=arguments.endswith("}"))


@pytest.mark.parametrize("case", TEXTS)
def test_one_call_at_most(case: str) -> None:
    text, content = TEXTS[case]
    for chunks in ([text], list(text)):
        parts = parse(ChatParser(style_of(case), TOOLS, max_calls=1), chunks, cut=False)
        assert [call.name for call in parts.calls] == ["add"]
        assert parts.content == content


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
    *('{"name": "add"', '"name": "weather"', '"arguments": ', '"parameters": ', '{"a": 1}', "{", "}", "[", "]", '"'),
    *(", ", ";", ": ", "null", "NaN", "1e999", "\\ud83d", "\\", "x", " ", "\n", "add", "é", "\U0001f600", "{}}"),
    '<tool_call>{"name": "add", "arguments": {"a": "',
    '{"name": "add", "parameters": {"b": [',
    '[TOOL_CALLS][{"name": "add", "arguments": {}}',
    *("<function=add>", "<parameter=a>\n", "\n</parameter>", "</function>", "<tool_call>add\n", "<arg_key>a</arg_key>"),
    *(
        "<arg_value>",
        "</arg_value>",
        '<invoke name="add">',
        '<parameter name="a">',
        "</invoke>",
        "functools",
        "```json\n",
    ),
    *(
        "<|tool_call|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>add\n",
        "<｜tool▁call▁end｜>",
    ),
    *(
        "<tool_call>\n<function=add>\n<parameter=a>\n",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>",
        "<response>",
    ),
)


@settings(max_examples=400, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    style=st.sampled_from(sorted(STYLES)),
    cut=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "thinking": st.booleans(),
            "inside": st.booleans(),
            "forced": st.booleans(),
            "max_calls": st.sampled_from([None, 1]),
            "wrapped": st.booleans(),
        }
    ),
)
def test_a_stream_says_what_a_whole_says(
    fragments: list[str], cuts: list[int], style: str, cut: bool, options: dict[str, Any]
) -> None:
    """Holds for any text in any pieces; a complete call's arguments are a JSON object that can be sent and parsed."""
    text = "".join(fragments)
    positions = sorted({0, len(text), *(cut_at % (len(text) + 1) for cut_at in cuts)})
    chunks = [text[start:end] for start, end in itertools.pairwise(positions)]
    expected = parse(ChatParser(STYLES[style], TOOLS, **options), [text], cut=cut)
    streamed = parse(ChatParser(STYLES[style], TOOLS, **options), chunks, cut=cut)
    assert in_order(streamed) == in_order(expected)
    if not options["forced"]:
        for call in expected.calls:
            call.arguments.encode()
            if call.complete:
                assert isinstance(read(call.arguments), dict)
    if not (expected.calls or cut or options["forced"] or options["thinking"]):
        assert expected.content == text
