"""JSON in text that models generate: where a value ends, its members, and its parsed value, all read strictly.

A text may break off anywhere. Nothing here recurses over a text, and everything takes linear time.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

MAX_DEPTH = 100  # levels of objects and lists: far below what exhausts a parser's or a template's recursion
MAX_DIGITS = 4300  # of an integer: Python's limit for conversion
LARGEST = sys.float_info.max
WHITE_SPACE = " \t\n\r"
REPLACEMENT = "\\ufffd"  # U+FFFD, escaped
# Both match in time linear in the text. Of an escape, the last alternative is any other, or the beginning of one.
ESCAPES = re.compile(
    r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|\\u[dD][89a-fA-F][\da-fA-F]{2}|\\.",
    re.ASCII | re.DOTALL,
)
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
LONE = len(r"\uD800")


class JsonScanner:
    """Finds the end of a JSON object or list in a text that grows. Every character is examined once."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped, self._scanned = 0, False, False, 0

    def end(self, text: str, start: int) -> int | None:
        """Return the index in `text` after the last character of the value that begins at `start`; None if it goes on.

        What an earlier call has scanned is not scanned again: the text may only have grown, and ended nowhere before.
        """
        start, self._scanned = max(start, self._scanned), len(text)
        for index in range(start, len(text)):
            character = text[index]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


def read(text: str) -> Any:
    """Parse a complete JSON text. Raises ValueError for invalid JSON, NaN, Infinity and more than MAX_DEPTH levels.

    Numbers beyond a double's range become the largest double, so that they are numbers to every parser; half surrogate
    pairs become U+FFFD.
    """
    try:
        value = json.loads(
            without_lone_surrogates(text), parse_constant=refuse_constant, parse_float=finite, parse_int=whole_number
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if depth(value) > MAX_DEPTH:
        raise ValueError("nested too deeply")
    return value


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def finite(digits: str) -> float:
    return max(-LARGEST, min(float(digits), LARGEST))


def whole_number(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else finite(digits)


def depth(document: Any) -> int:
    """Return the levels of nested objects and lists; without recursion, which a document could exhaust."""
    level, layer = 0, [document]
    while layer := [inner for inner in layer if isinstance(inner, dict | list)]:
        level += 1
        layer = [item for inner in layer for item in (inner.values() if isinstance(inner, dict) else inner)]
    return level


def without_lone_surrogates(text: str) -> str:
    """Replace every lone surrogate of a JSON text, escaped or not, by U+FFFD; the result can be encoded as UTF-8."""
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return ESCAPES.sub(lambda match: REPLACEMENT if len(match[0]) == LONE else match[0], text)


def members(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield, for the object that `text` begins with, each member's name, its value's text, and whether it is complete.

    Where the text breaks off, the last value may be incomplete. Raises ValueError if it cannot continue as an object.
    """
    index = skip(text, 1)
    while text.startswith('"', index):
        end = string_end(text, index)
        if end is None:
            return
        name = json.loads(text[index:end])
        index = skip(text, end)
        if index < len(text) and text[index] != ":":
            raise ValueError("no colon after a name")
        index = skip(text, index + 1)
        end = value_end(text, index)
        if index < len(text):
            yield name, text[index:end], end is not None
        if end is None:
            return
        index = after_comma(text, end, "}")
    if index < len(text) and text[index] != "}":
        raise ValueError("no name")


def elements(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each element's text of the list that begins `text`, and whether it is complete. Raises ValueError."""
    index = skip(text, 1)
    while index < len(text) and text[index] != "]":
        end = value_end(text, index)
        yield text[index:end], end is not None
        if end is None:
            return
        index = after_comma(text, end, "]")


def after_comma(text: str, index: int, closing: str) -> int:
    index = skip(text, index)
    if index < len(text) and text[index] not in ("," + closing):
        raise ValueError(f"neither a comma nor {closing}")
    return skip(text, index + 1) if text.startswith(",", index) else index


def skip(text: str, index: int) -> int:
    """Return the next index without white space, or the text's length."""
    while index < len(text) and text[index] in WHITE_SPACE:
        index += 1
    return min(index, len(text))


def value_end(text: str, index: int) -> int | None:
    """Return the index after the value that begins at `index`, or None if the text breaks off before."""
    if text.startswith(("{", "["), index):
        return JsonScanner().end(text, index)
    if text.startswith('"', index):
        return string_end(text, index)
    return next((end for end in range(index, len(text)) if text[end] in ",}]" + WHITE_SPACE), None)


def string_end(text: str, index: int) -> int | None:
    """Return the index after the string that begins at `index`, or None if the text breaks off before."""
    string = STRING.match(text, index)
    return None if string is None else string.end()
