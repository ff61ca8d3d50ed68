"""gpt-oss's harmony format: channels become reasoning, content and calls, however the text is split into pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.server.parsing.harmony import HarmonyParser
from infer.server.parsing.style_choice import style_of
from infer.server.parsing.tool_styles import Call
from tests.chats import TEMPLATES
from tests.server.harness import MODEL, Server
from tests.server.talking import ASKED
from tests.server.test_parsing import TOOLS, parse, pieces
from tests.server.test_tools import ADD, calls_of, chat

NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>hm < 2{NEXT}"
SUM = '{"a": 1, "b": [2]}'
# text -> reasoning, content, calls
CASES: list[tuple[str, str, str, list[Call]]] = [
    (f"{THOUGHT}<|channel|>final<|message|>It is 3 <|en", "hm < 2", "It is 3 <|en", []),
    (
        f"{THOUGHT}<|channel|>commentary<|message|>I add.{NEXT}<|channel|>commentary to=functions.add "
        f"<|constrain|>json<|message|>{SUM}",
        "hm < 2",
        "I add.",
        [Call("add", SUM)],
    ),
    (f" to=functions.add<|channel|>commentary json<|message|>{SUM}", "", "", [Call("add", SUM)]),
    ("<|channel|>commentary to=functions.weather<|message|> ", "", "", [Call("weather", "{}")]),
    ("<|channel|>commentary to=functions.rm json<|message|>{}", "", "{}", []),
    ("<|channel|>commentary to=functions.add json<|message|>[1]", "", "[1]", []),
    (f"{THOUGHT}<|channel|>analysis to=python code<|message|>1+2", "hm < 21+2", "", []),
    (f"{THOUGHT}<|channel|>fin", "hm < 2", "", []),
    # a mark out of place is no text: it ends the header or the message in which it stands
    (f"<|channel|>??<|end|><|start|>assistant{THOUGHT}<|channel|>final<|message|>It is 3.", "hm < 2", "It is 3.", []),
    ("<|channel|>analysis<|start|>assistant<|channel|>final<|message|>It is 3.", "", "It is 3.", []),
    ("<|channel|>??<|end|>It is 3.", "", "It is 3.", []),
    ("<|start|><|start|>assistant<|return|><|channel|>final<|message|>It is 3.<|return|>", "", "It is 3.", []),
    ("<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>3", "hm", "3", []),
    ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>3", "hm", "3", []),
    ("<|channel|>musing<|message|>hm", "", "hm", []),
    (
        f"<|channel|>??<|call|>{THOUGHT}<|channel|>commentary to=functions.add"
        f"<|constrain|>json<|message|>{SUM}<|call|>",
        "hm < 2",
        "",
        [Call("add", SUM)],
    ),
    ("<|message|>It is 3.", "", "It is 3.", []),
    ("no header at all", "", "no header at all", []),
    ("", "", "", []),
]


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=60))
@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case[0][-30:]))
def test_channels_are_told_apart_however_the_text_comes(case: Any, cuts: list[int]) -> None:
    text, reasoning, content, calls = case
    parser = HarmonyParser(TOOLS)
    parts = parse(parser, pieces(text, cuts))
    assert (parts.reasoning, parts.content, parts.calls) == (reasoning, content, calls)
    first, last = parser.reasoning_span
    assert text[first:last].startswith(reasoning[:5])
    assert parse(HarmonyParser([]), pieces(text, cuts)).calls == []


def test_an_answer_that_is_cut_off() -> None:
    header = "<|channel|>commentary to=functions.add json<|message|>"
    assert HarmonyParser(TOOLS).take(f'{header}{{"a": 1', "length").calls == [Call("add", '{"a": 1', complete=False)]
    assert HarmonyParser(TOOLS).take(f"{header}{SUM}", "length").calls == [Call("add", SUM)]
    assert HarmonyParser(TOOLS, inside=True).take('{"a": 1', "length").content == '{"a": 1'
    two = HarmonyParser(TOOLS, max_calls=1).take(f"{header}{SUM}{NEXT}{header}{SUM}", "stop")
    assert two.calls == [Call("add", SUM)]


def test_the_chat_template_tells_the_format() -> None:
    style = style_of(TEMPLATES["gpt_oss"]["default"])
    assert style is not None
    assert style.name == "harmony"


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_writes_harmony(talking: dict[str, Server], stream: bool) -> None:
    response = chat(talking["harmony"], stream=stream)
    choices = [event["choices"][0] for event in (response if stream else [response])]
    parts = [choice["delta" if stream else "message"] for choice in choices]
    assert "".join(part.get("reasoning_content") or "" for part in parts) == "1 and 2 is 3"
    assert "".join(part.get("content") or "" for part in parts) == "I add."
    calls = [call for part in parts for call in part.get("tool_calls", [])]
    assert calls_of({"tool_calls": calls}) == [("add", {"a": 1, "b": 2})]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_forced_calls_and_forms(talking: dict[str, Server]) -> None:
    """A call that is required has its header; the text of a form is the channel `final`, whose header is prompt."""
    server = talking["harmony"]
    choice = chat(server, tool_choice="required")["choices"][0]
    ((name, arguments),) = calls_of(choice["message"])
    assert (name, choice["message"]["content"]) == ("add", None)
    assert 0 <= arguments["a"] <= 99
    bound = chat(server, tools=None, structured_outputs={"choice": ["yes", "no"]})
    assert bound["choices"][0]["message"]["content"] in ("yes", "no")
    tools = [{"type": "function", **ADD["function"]}]
    body = {"model": MODEL, "input": ASKED, "temperature": 0, "tools": tools}
    kinds = [item["type"] for item in server.post("/v1/responses", body).json()["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
