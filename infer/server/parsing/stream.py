"""Incremental parser of a chat's output into reasoning, content and tool calls.

The result does not depend on how the text is split into pieces, so several tokens per step change nothing. Text that
turns out not to be a call is returned as content, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from infer.server.parsing.tagged_arguments import TagScanner, arguments_text
from infer.server.parsing.tool_styles import ALPHANUMERIC, CALL_ID, CALL_KEYS, Call, ToolStyle, arguments_call
from models.json_text import JsonScanner, skip

THINK, END_THINK = "<think>", "</think>"
RESPONSE, END_RESPONSE = "<response>", "</response>"  # around an answer after its reasoning (Granite 3.3)
NO_CALL = ("", -1)
FENCE = "```"
MAX_OPENING = 80  # characters in which the first key of an unmarked call begins
UNMARKED = tuple(
    f'{fence}{bracket}{{"{key}"' for fence in ("", FENCE, f"{FENCE}json") for bracket in ("", "[") for key in CALL_KEYS
)


@dataclass(frozen=True)
class Span:
    """A stretch of text of one kind."""

    kind: Literal["content", "reasoning"]
    text: str


@dataclass
class Parts:
    """Spans and calls in the order in which the model wrote them."""

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

    def _text(self, kind: str) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Span) and item.kind == kind)


@dataclass(eq=False)
class ChatParser:
    """Parses the text of one choice."""

    style: ToolStyle | None
    tools: Collection[str]
    thinking: bool = False  # a reasoning span may begin the text
    inside: bool = False  # and the prompt has already begun it
    wrapped: bool = False  # what follows it may stand between RESPONSE and END_RESPONSE
    forced: bool = False  # a grammar restricts the text to calls
    max_calls: int | None = None  # further ones are dropped
    fits: Callable[[Call], bool] | None = None  # a call's arguments; calls that are all of the text need no marks
    schemas: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the tools' parameters, for types that tags do not show

    def __post_init__(self) -> None:
        self.style = self.style if self.tools else None
        self._cut = self.forced  # whether the output was truncated: then an incomplete call still counts
        self._calls = 0
        self._state = "reasoning" if self.thinking and self.inside else "start"
        self._pushed = 0  # characters taken so far
        self._buffer = ""  # not yet parsed; always a suffix of the text taken
        self._marked = ""  # removed from the buffer as the mark of a call that has begun
        self._head: tuple[str, int] | None = None  # of that call: name and start of the arguments (_find_head)
        self._end: int | None = None  # of its arguments, exclusive
        self._scanner: JsonScanner | TagScanner = JsonScanner()
        self._after_call = False  # white space around calls is not content
        self._after_reasoning = False  # nor are newlines after the reasoning
        self._is_wrapped = False  # whether END_RESPONSE ends the content
        self.reasoning_span = (0, 0)  # (first, last + 1) in the characters taken, without its marks

    def take(self, text: str, finish_reason: str | None) -> Parts:
        """Parse a piece of the text; the last one has a finish reason, which is "stop" unless the text is truncated."""
        self._buffer += text
        self._pushed += len(text)
        parts, ended = Parts(), finish_reason is not None
        self._cut |= ended and finish_reason != "stop"
        for last in (False, True)[: 1 + ended]:
            while getattr(self, f"_in_{self._state}")(parts, last):  # a transition; False: the next needs more text
                pass
        if ended:
            rest, self._buffer = self._buffer, ""
            (self._reasoning if self._state == "reasoning" else self._content)(parts, rest)
        return parts

    def _in_start(self, parts: Parts, last: bool) -> bool:
        """State before the first character that is not white space."""
        if self._after_reasoning:
            self._buffer = self._buffer.lstrip("\n")
        text, style = self._buffer.lstrip(), self.style
        openings = [*([THINK] if self.thinking else []), *(style.begins if style is not None else ())]
        if self.wrapped and self._after_reasoning:
            openings.append(RESPONSE)
        if not self._buffer or (openings and not text):  # where nothing can open, white space is content
            return False
        if not last and any(mark.startswith(text) for mark in openings):
            return False
        if self.thinking and text.startswith(THINK):
            self._buffer, self._state = text.removeprefix(THINK), "reasoning"
            begin = self._pushed - len(self._buffer)
            self.reasoning_span = begin, begin
        elif style is not None and style.bare and text.startswith(("{", *style.begins)):
            self._begin_bare_call(text)
        else:
            self._is_wrapped = RESPONSE in openings and text.startswith(RESPONSE)
            self._buffer = text.removeprefix(RESPONSE) if self._is_wrapped else self._buffer
            self._state = "content" if style is None or self.fits is None else "unmarked"
            self._end, self._scanner = None, JsonScanner()
        return True

    def _in_unmarked(self, parts: Parts, last: bool) -> bool:
        """State while the text may be nothing but calls without their marks: only its end decides that."""
        text, calls = self._buffer, None
        first = "".join(text[:MAX_OPENING].split())
        if any(opening.startswith(first) or first.startswith(opening) for opening in UNMARKED):
            begin = next((index for index, character in enumerate(text) if character in "{["), len(text))
            if self._end is None:
                self._end = self._scanner.end(text, begin)
            rest = "" if self._end is None else text[self._end :].strip()
            if not last and (FENCE.startswith(rest) or rest.startswith("{")):
                return False
            calls = self._unmarked_calls(text) if last else None
        if calls:
            self._add_calls(parts, calls)
            self._buffer = ""
        self._state = "content"
        return True

    def _unmarked_calls(self, text: str) -> list[Call] | None:
        """Return the calls that a text consists of, bare or in a fence; None if it is anything else."""
        assert self.style is not None
        assert self.fits is not None
        calls: list[Call] = []
        text = text.strip()
        fenced = text.startswith(FENCE)
        if fenced:
            text = text.removeprefix(FENCE).removeprefix("json").lstrip()
        while text and not (fenced and calls and FENCE.startswith(text)):
            end = JsonScanner().end(text, 0) if text[0] in "{[" else None
            value = self.style.calls_in(text[:end], self.tools, unmarked=True) if end else None
            if not value or not all(map(self.fits, value)):
                return None
            calls, text = calls + value, text[end:].lstrip()
        return calls

    def _in_reasoning(self, parts: Parts, last: bool) -> bool:
        before, mark, self._buffer = split(self._buffer, (END_THINK,), last)
        self._reasoning(parts, before)
        if mark:
            self._state, self.thinking, self._after_reasoning = "start", False, True
        return bool(mark)

    def _reasoning(self, parts: Parts, text: str) -> None:
        if text:
            parts.items.append(Span("reasoning", text))
            self.reasoning_span = self.reasoning_span[0], self.reasoning_span[1] + len(text)

    def _in_content(self, parts: Parts, last: bool) -> bool:
        marks = (*(self.style.begins if self.style is not None else ()), *([END_RESPONSE] if self._is_wrapped else []))
        before, mark, self._buffer = split(self._buffer, marks, last)
        if not before.strip() and not mark and not last and self._after_call:
            self._buffer = before + self._buffer
            return False
        self._content(parts, before)
        if mark == END_RESPONSE:
            self._is_wrapped = False
        elif mark:
            self._begin_call(mark, self._buffer)
        return bool(mark)

    def _content(self, parts: Parts, text: str) -> None:
        if self.forced or (self._after_call and not text.strip()):
            return
        if text:
            parts.items.append(Span("content", text))
            self._after_call = False

    def _begin_call(self, marked: str, rest: str) -> None:
        self._state, self._marked, self._buffer = "call", marked, rest
        self._head, self._end, self._scanner = None, None, JsonScanner()

    def _begin_bare_call(self, text: str) -> None:
        """Begin a call at the text, which the buffer ends with, with or without its mark."""
        assert self.style is not None
        rest = text.removeprefix(self.style.begins[0])
        self._begin_call(self._buffer.removesuffix(rest), rest)

    def _in_call(self, parts: Parts, last: bool) -> bool:
        """State after the mark of a call: [name,] arguments, [end marks]."""
        assert self.style is not None
        text = self._buffer
        if self._head is None:
            self._head = self._find_head(text)
            if self._head is NO_CALL:
                return self._no_call(parts, text)
            if (
                self._head is not None
                and self.style.tags is not None
                and not text.startswith(("{", "["), self._head[1])
            ):
                self._scanner = TagScanner(self.style.tags, self.style.ends[0])
        if self._head is not None and self._end is None:
            self._end = self._scanner.end(text, self._head[1])
        if self._head is None or self._end is None:
            return self._broken_off(parts, text) if last else False
        calls = self._complete_calls(text)
        if calls is None:
            return self._no_call(parts, text)
        rest = text[self._end :]
        for mark in self.style.ends:
            after = rest.lstrip()
            if len(after) < len(mark) and mark.startswith(after):
                if not last:
                    return False
                after = ""  # a partial end mark is not content
            rest = after.removeprefix(mark) if not after or after.startswith(mark) else rest
        self._add_calls(parts, calls)
        self._buffer, self._state = rest, "next" if self.style.bare else "content"
        return True

    def _find_head(self, text: str) -> tuple[str, int] | None:
        """Return the name before the arguments ("" if none) and where these begin.

        None if more text is needed, NO_CALL if this is no call.
        """
        assert self.style is not None
        begin = skip(text, 0)
        if begin == len(text):
            return None
        if text[begin] in "{[":
            return "", begin
        places = self._places(text)
        complete = [(name, place) for name, (_, place) in places.items() if place < len(text)]
        return complete[0] if complete else None if places else NO_CALL

    def _places(self, text: str) -> dict[str, tuple[int, int]]:
        """Return, for each tool that a text without JSON may call, where its name ends and its arguments begin."""
        assert self.style is not None
        candidates = {name: name_places(text, name, self.style) for name in self.tools} if self.style.named else {}
        return {name: places for name, places in candidates.items() if places is not None}

    def _complete_calls(self, text: str) -> list[Call] | None:
        assert self.style is not None
        assert self._head is not None
        name, begin = self._head
        value = text[begin : self._end]
        if not name:
            return self.style.calls_in(value, self.tools, trusted=self.forced)
        if isinstance(self._scanner, TagScanner):
            return None if self._scanner.broken else [self._tagged_call(self._scanner, is_complete=True)]
        try:
            return [arguments_call(name, value, is_complete=True, strict=not self.forced)]
        except ValueError:
            return None

    def _tagged_call(self, scanner: TagScanner, *, is_complete: bool) -> Call:
        assert self._head is not None
        name = self._head[0]
        arguments = arguments_text(scanner.parameters, self.schemas.get(name, True), is_complete=is_complete)
        return Call(name, arguments, complete=is_complete)

    def _broken_off(self, parts: Parts, text: str) -> bool:
        """Handle a call that is incomplete at the end of the text.

        In a truncated output it counts as a call once its name is complete, and is dropped before that.
        """
        assert self.style is not None
        calls: list[Call] | None
        if not self._cut:
            calls = None
        elif self._head is None:
            calls = [Call(name, "", complete=False) for name, (end, _) in self._places(text).items() if end < len(text)]
        elif isinstance(self._scanner, TagScanner):
            calls = [self._tagged_call(self._scanner, is_complete=False)]
        elif self._head[0]:
            calls = [arguments_call(self._head[0], text[self._head[1] :], is_complete=False, strict=False)]
        else:
            rest = text[self._head[1] :]
            calls = self.style.calls_in(rest, self.tools, is_complete=False, trusted=self.forced)
        if calls is None:
            return self._no_call(parts, text)
        self._add_calls(parts, calls)
        self._buffer, self._state = "", "content"
        return False

    def _add_calls(self, parts: Parts, calls: list[Call]) -> None:
        calls = calls if self.max_calls is None else calls[: self.max_calls - self._calls]
        parts.items += calls
        self._calls += len(calls)
        self._after_call = True

    def _in_next(self, parts: Parts, last: bool) -> bool:
        """State after a bare call: another one, after a semicolon or white space, or content."""
        assert self.style is not None
        text = self._buffer
        after = text.lstrip()
        if not after:
            return False
        call = after.removeprefix(";").lstrip()
        if not call or (not last and any(len(call) < len(m) and m.startswith(call) for m in self.style.begins)):
            self._buffer = "" if last else text
            return False
        self._state = "content"
        if call.startswith(("{", *self.style.begins)):
            self._begin_bare_call(call)
        return True

    def _no_call(self, parts: Parts, text: str) -> bool:
        """Return the removed mark to the content, because no call followed, and continue the search after it."""
        self._after_call = False
        self._content(parts, self._marked)
        self._buffer, self._state = text, "content"
        return True


def name_places(text: str, name: str, style: ToolStyle) -> tuple[int, int] | None:
    """Return where this tool's name ends in a text, and where its arguments begin.

    Both are the text's length if it ends before them; None if another name is there.
    """
    place, name_end = 0, len(text)
    for mark in (*style.before, name, *style.after):
        place = skip(text, place)
        written = text[place : place + len(mark)]
        if written == mark:
            place += len(mark)
            name_end = place if mark == name else name_end
            if mark == CALL_ID:
                place = len(text) - len(text[place:].lstrip(ALPHANUMERIC))
        elif len(written) < len(mark) and mark.startswith(written):
            return name_end, len(text)
        elif mark == name:
            return None
    place = skip(text, place)
    opens = place == len(text) or text[place] == "{" or (style.tags is not None and text[place] == "<")
    return (name_end, place) if opens else None


def split(text: str, marks: Sequence[str], last: bool) -> tuple[str, str, str]:
    """Return the text before the first of `marks`, that mark, and the text after it.

    Without a mark it is "", and the text after it is what is held back because a mark may begin there.
    """
    places = {mark: place for mark in marks if (place := text.find(mark)) >= 0}
    if places:
        mark = min(places, key=places.__getitem__)
        return text[: places[mark]], mark, text[places[mark] + len(mark) :]
    longest = 0 if last else min(max(map(len, marks), default=1) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length], "", text[-length:]
    return text, "", ""
