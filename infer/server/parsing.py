"""A chat's text as it comes, taken apart: reasoning, content and tool calls. However it is cut into pieces, the parts
are the same, so several tokens per step change nothing. What turns out to be no call is content, to the character.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from infer.server.tool_styles import Call, JsonScanner, ToolStyle

THINK, END_THINK = "<think>", "</think>"


@dataclass
class Parts:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, other: Parts) -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class ChatParser:
    """`thinking`: whether a reasoning span may begin the text, or, with `inside`, the prompt has begun it already."""

    def __init__(
        self, style: ToolStyle | None, tools: Sequence[str], *, thinking: bool = False, inside: bool = False
    ) -> None:
        self._style, self._tools = (style if tools else None), set(tools)
        self._thinking, self._inside = thinking, thinking and inside
        self._state = "reasoning" if self._inside else "start"
        self._pushed = 0  # characters
        self._span = (0, 0)  # of the reasoning, as places in all that was pushed
        self._buffer = ""  # not yet decided; always the end of what was pushed
        self._searched = 0  # how much of it a scanner has seen
        self._scanner = JsonScanner()
        self._after_call = False  # white space around calls is no content
        self._after_reasoning = False  # nor are the line ends that set an answer off

    @property
    def reasoning_span(self) -> tuple[int, int]:
        """First and last + 1 of the reasoning's characters among those pushed, its marks left out; so far."""
        return self._span

    def push(self, text: str) -> Parts:
        self._buffer += text
        self._pushed += len(text)
        parts = Parts()
        while self._step(parts, last=False):
            pass
        return parts

    def finish(self) -> Parts:
        """What is left when no more text comes."""
        parts = Parts()
        while self._step(parts, last=True):
            pass
        rest, self._buffer = self._buffer, ""
        if self._state == "reasoning":
            self._reasoning(parts, rest)
        else:
            self._content(parts, rest, last=True)
        return parts

    def all_of(self, text: str) -> Parts:
        """Of a text that is whole."""
        parts = self.push(text)
        parts.add(self.finish())
        return parts

    def _step(self, parts: Parts, *, last: bool) -> bool:
        """One decision. False: more text is needed for the next."""
        return getattr(self, f"_in_{self._state}")(parts, last)

    def _in_start(self, parts: Parts, last: bool) -> bool:
        """Before the first character that is no space."""
        if self._after_reasoning:
            self._buffer = self._buffer.lstrip("\n")
        text, style = self._buffer.lstrip(), self._style
        if not text or (not last and any(mark.startswith(text) for mark in self._openings())):
            return False
        if self._thinking and text.startswith(THINK):
            self._buffer, self._state = text.removeprefix(THINK), "reasoning"
            begin = self._pushed - len(self._buffer)
            self._span = begin, begin
        elif style is not None and style.bare and text.startswith(("{", style.begin)):
            self._buffer = text.removeprefix(style.begin) if text.startswith(style.begin) else self._buffer
            self._state = "call"
        else:
            self._state = "content"
        return True

    def _openings(self) -> list[str]:
        marks = [THINK] if self._thinking else []
        return [*marks, self._style.begin] if self._style is not None else marks

    def _in_reasoning(self, parts: Parts, last: bool) -> bool:
        before, found, after = split(self._buffer, END_THINK, last)
        self._reasoning(parts, before)
        self._buffer = after
        if found:
            self._state, self._thinking, self._after_reasoning = "start", False, True
        return found

    def _reasoning(self, parts: Parts, text: str) -> None:
        begin, end = self._span
        parts.reasoning, self._span = parts.reasoning + text, (begin, end + len(text))

    def _in_content(self, parts: Parts, last: bool) -> bool:
        if self._style is None:
            self._content(parts, self._buffer, last)
            self._buffer = ""
            return False
        before, found, self._buffer = split(self._buffer, self._style.begin, last)
        if not before.strip() and not found and not last and self._after_call:
            self._buffer = before + self._buffer
            return False
        self._content(parts, before, last or found)
        if found:
            self._state, self._searched, self._scanner = "call", 0, JsonScanner()
        return found

    def _content(self, parts: Parts, text: str, last: bool) -> None:
        if self._after_call:
            text = "" if not text.strip() else text
        if text:
            parts.content += text
            self._after_call = False

    def _in_call(self, parts: Parts, last: bool) -> bool:
        """After the mark of a call: [name, separator,] a JSON value, [an end mark]."""
        assert self._style is not None
        text = self._buffer
        opening = min((place for mark in "{[" if (place := text.find(mark)) >= 0), default=None)
        if opening is not None and self._style.named and text[:opening].strip():
            if text.startswith(self._style.separator, opening):
                opening = text.find("{", opening + len(self._style.separator))
            elif not last and self._style.separator.startswith(text[opening:]):
                return False  # the separator is not whole yet
        if opening is None or opening < 0:
            return self._no_call(parts, text) if last else False
        end = self._scanner.end(text, max(opening, self._searched))
        if end is None:
            self._searched = len(text)
            return self._no_call(parts, text) if last else False
        name = text[:opening].strip().removesuffix(self._style.separator).strip()
        calls = self._calls(name, text[opening:end])
        if calls is None:
            return self._no_call(parts, text)
        rest = text[end:]
        if self._style.end:
            padded = rest.lstrip()
            if not last and len(padded) < len(self._style.end) and self._style.end.startswith(padded):
                self._scanner, self._searched = JsonScanner(), 0  # read again when the end mark is whole
                return False
            rest = padded.removeprefix(self._style.end)
        parts.calls += calls
        self._after_call, self._scanner, self._searched = True, JsonScanner(), 0
        self._buffer, self._state = rest, "next" if self._style.bare else "content"
        return True

    def _in_next(self, parts: Parts, last: bool) -> bool:
        """After a bare call: a semicolon and another one, or content."""
        text = self._buffer.lstrip()
        if not text:
            return False
        if text.startswith(";"):
            self._buffer, self._state = text[1:], "start"
        else:
            self._state = "content"
        return True

    def _calls(self, name: str, value: str) -> list[Call] | None:
        assert self._style is not None
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return None
        if self._style.named and name:
            return [Call(name, value)] if name in self._tools else None
        return None if name else self._style.calls_in(parsed, self._tools)

    def _no_call(self, parts: Parts, text: str) -> bool:
        """The mark that was taken off belongs to the content after all; the search goes on behind it."""
        assert self._style is not None
        mark = "" if self._style.bare else self._style.begin
        self._after_call = False
        parts.content += mark
        self._buffer, self._state = text, "content"
        self._scanner, self._searched = JsonScanner(), 0
        return True


def split(text: str, mark: str, last: bool) -> tuple[str, bool, str]:
    """What comes before `mark`, whether it was found, and what follows or is held back as its possible beginning."""
    place = text.find(mark)
    if place >= 0:
        return text[:place], True, text[place + len(mark) :]
    if last:
        return text, False, ""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length], False, text[-length:]
    return text, False, ""
