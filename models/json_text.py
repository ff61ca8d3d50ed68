"""JSON in texts that models write: where a value ends, what its members say, and what it means, read strictly.

A text may break off anywhere. Nothing here recurses over a text, and nothing costs more than its length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

MAX_DEPTH = 100  # levels of objects and lists: far below what exhausts a parser's or a template's recursion
MAX_DIGITS = 4300  # of an integer: Python converts no more
LARGEST = sys.float_info.max
WHITE_SPACE = " \t\n\r"
HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
REPLACEMENT = "\\ufffd"  # U+FFFD, escaped


class JsonScanner:
    """Where a JSON object or list that comes in pieces ends. Every character is looked at once."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def end(self, text: str, start: int) -> int | None:
        """The place after the value's last character, of `text[start:]`; None if it goes on."""
        for place in range(start, len(text)):
            character = text[place]
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
                    return place + 1
        return None


def read(text: str) -> Any:
    """The value of a whole JSON text. Raises ValueError for NaN, Infinity and more than MAX_DEPTH levels.

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
    """Levels of objects and lists; without recursion, which a document could exhaust."""
    level, layer = 0, [document]
    while layer := [inner for inner in layer if isinstance(inner, dict | list)]:
        level += 1
        layer = [item for inner in layer for item in (inner.values() if isinstance(inner, dict) else inner)]
    return level


def without_lone_surrogates(text: str) -> str:
    """JSON text in which every half of a surrogate pair, escaped or not, is U+FFFD; UTF-8 can hold the result."""
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    pieces, done, place = [], 0, 0
    while (place := text.find("\\", place)) >= 0:
        unit = code_unit(text, place)
        if unit is None:
            place += 2
        elif 0xD800 <= unit < 0xDC00 and 0xDC00 <= (code_unit(text, place + 6) or 0) < 0xE000:
            place += 12
        else:
            if 0xD800 <= unit < 0xE000:
                pieces += [text[done:place], REPLACEMENT]
                done = place + 6
            place += 6
    return "".join([*pieces, text[done:]])


def code_unit(text: str, place: int) -> int | None:
    """Of the escape `\\uXXXX` at `place`; None if there is another one or none."""
    digits = text[place + 2 : place + 6]
    if text[place : place + 2] != "\\u" or len(digits) < 4 or not all(digit in HEXADECIMAL for digit in digits):
        return None
    return int(digits, 16)


def members(text: str) -> Iterator[tuple[str, str, bool]]:
    """Of the object with which `text` begins: each member's name, its value's text, and whether that is whole.

    The last one's is not where the text breaks off. Raises ValueError where no object goes on like this.
    """
    place = skip(text, 1)
    while text.startswith('"', place):
        end = string_end(text, place)
        if end is None:
            return
        name = json.loads(text[place:end])
        place = skip(text, end)
        if place < len(text) and text[place] != ":":
            raise ValueError("no colon after a name")
        place = skip(text, place + 1)
        end = value_end(text, place)
        if place < len(text):
            yield name, text[place:end], end is not None
        if end is None:
            return
        place = after_comma(text, end, "}")
    if place < len(text) and text[place] != "}":
        raise ValueError("no name")


def elements(text: str) -> Iterator[tuple[str, bool]]:
    """Of the list with which `text` begins: each element's text, and whether it is whole. Raises ValueError."""
    place = skip(text, 1)
    while place < len(text) and text[place] != "]":
        end = value_end(text, place)
        yield text[place:end], end is not None
        if end is None:
            return
        place = after_comma(text, end, "]")


def after_comma(text: str, place: int, closing: str) -> int:
    place = skip(text, place)
    if place < len(text) and text[place] not in ("," + closing):
        raise ValueError(f"neither a comma nor {closing}")
    return skip(text, place + 1) if text.startswith(",", place) else place


def skip(text: str, place: int) -> int:
    """The next place that holds no white space, or the text's length."""
    while place < len(text) and text[place] in WHITE_SPACE:
        place += 1
    return min(place, len(text))


def value_end(text: str, place: int) -> int | None:
    """The place after the value that begins at `place`, or None if the text breaks off before."""
    if text.startswith(("{", "["), place):
        return JsonScanner().end(text, place)
    if text.startswith('"', place):
        return string_end(text, place)
    return next((end for end in range(place, len(text)) if text[end] in ",}]" + WHITE_SPACE), None)


def string_end(text: str, place: int) -> int | None:
    """The place after the string that begins at `place`, or None if the text breaks off before."""
    place, quote = place + 1, -1
    while True:
        if quote < place and (quote := text.find('"', place)) < 0:
            return None
        escape = text.find("\\", place, quote)
        if escape < 0:
            return quote + 1
        place = escape + 2
