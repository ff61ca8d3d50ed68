"""Parser of harmony, gpt-oss's format: an answer is a list of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>arguments

The first header's beginning is the end of the prompt. `analysis` is reasoning, a message to a tool of the request a
call, and everything else content, also a text without a header. A call ends the answer, as does the channel `final`.
Each mark is a special token, so one that is out of place is no text either: a header or message that another mark
interrupts ends there.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.server.parsing.stream import ChatParser, Parts, Span, split
from infer.server.parsing.tool_styles import arguments_call
from models.json_text import value_end

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")  # of a message
FINAL = f"{CHANNEL}final{MESSAGE}"  # the header of an answer whose form is given
OPENINGS = (START, CHANNEL, MESSAGE, "to=")  # of a header
TOOL = "functions."


class HarmonyParser(ChatParser):
    """As ChatParser. `inside`: the prompt ends with the header FINAL."""

    def __init__(
        self, tools: Sequence[str], *, inside: bool = False, forced: bool = False, max_calls: int | None = None
    ) -> None:
        super().__init__(None, tools, forced=forced, max_calls=max_calls)
        self._state, self._channel, self._recipient = "body" if inside else "header", "final", ""

    def _in_header(self, parts: Parts, last: bool) -> bool:
        text = self._buffer.lstrip()
        if not any(text.startswith(mark[: len(text)]) for mark in OPENINGS):
            self._state, self._channel = "body", "final"
            return True
        header, mark, rest = split(text.removeprefix(START), (MESSAGE, START, *ENDS), last)
        if mark == MESSAGE:
            self._channel = word_after(header, CHANNEL)
            self._recipient = word_after(header, "to=").removeprefix(TOOL)
            self._state, self._buffer = "call" if self._recipient in self.tools else "body", rest
        elif mark or last:  # a header without a message
            self._buffer = after_mark(mark, rest)
        return bool(mark)

    def _in_body(self, parts: Parts, last: bool) -> bool:
        begin = self._pushed - len(self._buffer)
        text, mark, rest = split(self._buffer, (*ENDS, START, CHANNEL), last)
        self._buffer = after_mark(mark, rest)
        if self._channel != "analysis":
            self._content(parts, text)
        elif text:
            parts.items.append(Span("reasoning", text))
            first, last_seen = self.reasoning_span
            self.reasoning_span = first if last_seen else begin, begin + len(text)
        self._state = "header" if mark else "body"
        return bool(mark)

    def _in_call(self, parts: Parts, last: bool) -> bool:
        text, mark, rest = split(self._buffer, (*ENDS, START, CHANNEL), last)
        if not (mark or last):
            return False
        value, self._buffer, self._state = text.strip(), after_mark(mark, rest), "header"
        is_complete = not self._cut or value_end(value, 0) is not None
        try:
            strict = bool(value) and not self.forced
            self._add_calls(parts, [arguments_call(self._recipient, value, is_complete, strict=strict)])
        except ValueError:
            self._content(parts, text)
        return bool(mark)


def after_mark(mark: str, rest: str) -> str:
    """Return the text that is next to parse: an end mark is dropped, one of a header begins it."""
    return rest if mark in ENDS else mark + rest


def word_after(text: str, mark: str) -> str:
    """Return what follows `mark` up to a space or another mark; empty where it does not occur."""
    words = text.partition(mark)[2].partition("<|")[0].split(maxsplit=1)
    return words[0] if words else ""
