"""A chat's text as it comes, taken apart: reasoning, content and tool calls. However it is cut into pieces, the parts
are the same, so several tokens per step change nothing. What turns out to be no call is content, to the character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from infer.server.parsing.tool_styles import Call, ToolStyle, arguments_call
from models.json_text import JsonScanner, skip

THINK, END_THINK = "<think>", "</think>"
NO_CALL = ("", -1)


@dataclass(frozen=True)
class Span:
    """Text of one kind."""

    kind: Literal["content", "reasoning"]
    text: str


@dataclass
class Parts:
    """What was written, in its order."""

    items: list[Span | Call] = field(default_factory=list)

    @property
    def content(self) -> str:
        return self._text("content")

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    @property
    def calls(self) -> list[Call]:
        return [item for item in self.items if isinstance(item, Call)]

    def add(self, other: Parts) -> None:
        self.items += other.items

    def _text(self, kind: str) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Span) and item.kind == kind)

    def __bool__(self) -> bool:
        return bool(self.items)


class ChatParser:
    """`thinking`: whether a reasoning span may begin the text, or, with `inside`, the prompt has begun it already.

    `forced`: a grammar lets the text be calls and nothing else. `most_calls`: any further ones are left out.
    """

    def __init__(
        self,
        style: ToolStyle | None,
        tools: Sequence[str],
        *,
        thinking: bool = False,
        inside: bool = False,
        forced: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self._style, self._tools = (style if tools else None), set(tools)
        self._thinking, self._inside = thinking, thinking and inside
        self._forced, self._most_calls = forced, most_calls
        self._cut = forced  # whether a call that has no end was cut: then it is one all the same
        self._calls = 0
        self._state = "reasoning" if self._inside else "start"
        self._pushed = 0  # characters
        self._span = (0, 0)  # of the reasoning, as places in all that was pushed
        self._buffer = ""  # not yet decided; always the end of what was pushed
        self._marked = ""  # what was taken off the buffer for a call that has begun
        self._head: tuple[str, int] | None = None  # of that call (_find_head)
        self._end: int | None = None  # of its JSON value
        self._searched = 0  # how much of the value the scanner has seen
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

    def finish(self, *, cut: bool = False) -> Parts:
        """What is left when no more text comes. `cut`: the model had not ended it."""
        self._cut |= cut
        parts = Parts()
        while self._step(parts, last=True):
            pass
        rest, self._buffer = self._buffer, ""
        if self._state == "reasoning":
            self._reasoning(parts, rest)
        else:
            self._content(parts, rest)
        return parts

    def all_of(self, text: str, *, cut: bool = False) -> Parts:
        """Of a text that is whole."""
        parts = self.push(text)
        parts.add(self.finish(cut=cut))
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
            rest = text.removeprefix(style.begin)
            self._begin_call(self._buffer.removesuffix(rest), rest)
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
        if text:
            parts.items.append(Span("reasoning", text))
            self._span = self._span[0], self._span[1] + len(text)

    def _in_content(self, parts: Parts, last: bool) -> bool:
        if self._style is None:
            self._content(parts, self._buffer)
            self._buffer = ""
            return False
        before, found, self._buffer = split(self._buffer, self._style.begin, last)
        if not before.strip() and not found and not last and self._after_call:
            self._buffer = before + self._buffer
            return False
        self._content(parts, before)
        if found:
            self._begin_call(self._style.begin, self._buffer)
        return found

    def _content(self, parts: Parts, text: str) -> None:
        if self._forced or (self._after_call and not text.strip()):
            return
        if text:
            parts.items.append(Span("content", text))
            self._after_call = False

    def _begin_call(self, marked: str, rest: str) -> None:
        self._state, self._marked, self._buffer = "call", marked, rest
        self._head = self._end = None
        self._searched, self._scanner = 0, JsonScanner()

    def _in_call(self, parts: Parts, last: bool) -> bool:
        """After the mark of a call: [name, separator,] a JSON value, [an end mark]."""
        assert self._style is not None
        text = self._buffer
        if self._head is None:
            self._head = self._find_head(text)
            if self._head is NO_CALL:
                return self._no_call(parts, text)
        if self._head is not None and self._end is None:
            self._end = self._scanner.end(text, max(self._head[1], self._searched))
            self._searched = len(text)
        if self._head is None or self._end is None:
            return self._broken_off(parts, text) if last else False
        calls = self._whole_calls(text)
        if calls is None:
            return self._no_call(parts, text)
        rest = text[self._end :]
        if self._style.end:
            rest = rest.lstrip()
            if len(rest) < len(self._style.end) and self._style.end.startswith(rest):
                if not last:
                    return False
                rest = ""  # what there is of the mark is no content
            rest = rest.removeprefix(self._style.end)
        self._add_calls(parts, calls)
        self._buffer, self._state = rest, "next" if self._style.bare else "content"
        return True

    def _find_head(self, text: str) -> tuple[str, int] | None:
        """The name that stands before the JSON value, if one does, and where the value begins. None: not there yet."""
        assert self._style is not None
        begin = skip(text, 0)
        if begin == len(text):
            return None
        if text[begin] in "{[":
            return "", begin
        places = {}
        if self._style.named:
            marks = (self._style.separator, "{")
            places = {name: place for name in self._tools if (place := after_name(text, begin, name, *marks))}
        complete = [(name, place) for name, place in places.items() if place < len(text)]
        return complete[0] if complete else None if places else NO_CALL

    def _whole_calls(self, text: str) -> list[Call] | None:
        assert self._style is not None
        assert self._head is not None
        name, begin = self._head
        value = text[begin : self._end]
        if not name:
            return self._style.calls_in(value, self._tools, trusted=self._forced)
        try:
            return [arguments_call(name, value, whole=True, strict=not self._forced)]
        except ValueError:
            return None

    def _broken_off(self, parts: Parts, text: str) -> bool:
        """No more text comes. A call that was cut is one once its name is there; what comes before that is left out."""
        assert self._style is not None
        calls: list[Call] | None
        if not self._cut:
            calls = None
        elif self._head is None:
            name = text.strip().removesuffix(self._style.separator).strip()
            separated = self._style.named and text.strip().endswith(self._style.separator)
            calls = [Call(name, "", complete=False)] if separated and name in self._tools else []
        elif self._head[0]:
            calls = [arguments_call(self._head[0], text[self._head[1] :], whole=False, strict=False)]
        else:
            calls = self._style.begun_calls(text[self._head[1] :], self._tools, trusted=self._forced)
        if calls is None:
            return self._no_call(parts, text)
        self._add_calls(parts, calls)
        self._buffer, self._state = "", "content"
        return False

    def _add_calls(self, parts: Parts, calls: list[Call]) -> None:
        calls = calls if self._most_calls is None else calls[: self._most_calls - self._calls]
        parts.items += calls
        self._calls += len(calls)
        self._after_call = True

    def _in_next(self, parts: Parts, last: bool) -> bool:
        """After a bare call: a semicolon and another one, or content."""
        assert self._style is not None
        text = self._buffer
        after = text.lstrip()
        if not after:
            return False
        self._state = "content"
        if after.startswith(";"):
            call = after[1:].lstrip()
            if not call or (not last and len(call) < len(self._style.begin) and self._style.begin.startswith(call)):
                self._state, self._buffer = "next", "" if last else text
                return False
            if call.startswith(("{", self._style.begin)):
                rest = call.removeprefix(self._style.begin)
                self._begin_call(text.removesuffix(rest), rest)
        return True

    def _no_call(self, parts: Parts, text: str) -> bool:
        """What was taken off belongs to the content after all; the search goes on behind it."""
        self._after_call = False
        self._content(parts, self._marked)
        self._buffer, self._state = text, "content"
        return True


def after_name(text: str, place: int, name: str, separator: str, opening: str) -> int | None:
    """Where the arguments begin after this tool's name, with or without the separator.

    The text's length where it breaks off before them; None where another name stands there.
    """
    for mark in (name, separator, opening):
        place = skip(text, place)
        written = text[place : place + len(mark)]
        if written == mark:
            place += len(mark)
        elif len(written) < len(mark) and mark.startswith(written):
            return len(text)
        elif mark != separator:
            return None
    return place - len(opening)


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
