"""Arguments of calls in tags, one parameter after the other: `<parameter=city>Paris</parameter>`.

A value stands there as it is, so that its type comes from the tool's schema: text that is JSON of a type that the
schema allows is that value, and any other text is a string.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from infer.server.parsing.schema_check import fits_member
from models.json_text import read, skip, without_lone_surrogates

PRINTED = {"True": "true", "False": "false", "None": "null"}  # what Jinja prints for these values


@dataclass(frozen=True)
class Tags:
    """The text of one parameter, with `$key` and `$value` in it. White space between its marks is not significant."""

    form: str

    @cached_property
    def parts(self) -> tuple[str, str, str]:
        """The texts before the key, between key and value, and after the value."""
        before, _, rest = self.form.partition("$key")
        between, _, after = rest.partition("$value")
        return before, between, after

    @property
    def marks(self) -> tuple[str, ...]:
        before, between, after = self.parts
        return (before, *between.split(), after.strip())

    def value(self, text: str) -> str:
        """Return a value without the line breaks that the form puts around it."""
        _, between, after = self.parts
        text = text.removeprefix("\n") if between.endswith("\n") else text
        return text.removesuffix("\n") if after.startswith("\n") else text


class TagScanner:
    """Finds the end of a call's parameters in a text that grows, as JsonScanner does for JSON."""

    def __init__(self, tags: Tags, closing: str) -> None:
        """`closing`: the mark after the last parameter."""
        self._tags, self._closing, self._place, self._searched = tags, closing, -1, 0
        self.parameters: dict[str, str] = {}  # complete ones
        self.broken = False  # something else stands where a parameter or the closing mark must

    def end(self, text: str, start: int) -> int | None:
        """Return the index of the closing mark, or where the text is `broken`; None if more text is needed."""
        self._place = max(self._place, start)
        while True:
            place = self._place = skip(text, self._place)
            if text.startswith(self._closing, place):
                return place
            if text.startswith(self._tags.marks[0], place):
                if not self._read_parameter(text, place):
                    return place if self.broken else None
            elif any(mark.startswith(text[place:]) for mark in (self._closing, self._tags.marks[0])):
                return None
            else:
                self.broken = True
                return place

    def _read_parameter(self, text: str, place: int) -> bool:
        begin, key_end, *value_begin, value_end = self._tags.marks
        first = place + len(begin)
        last = text.find(key_end, first)
        if last < 0:
            self.broken = "\n" in text[first:]  # a key is a name, and no key is longer than a line
            return False
        value = last + len(key_end)
        for mark in value_begin:
            value = skip(text, value)
            if not text.startswith(mark, value):
                self.broken = not mark.startswith(text[value:])
                return False
            value += len(mark)
        end = text.find(value_end, max(value, self._searched - len(value_end)))
        self._searched = len(text) if end < 0 else 0
        if end >= 0:
            self.parameters[text[first:last].strip()] = self._tags.value(text[value:end])
            self._place = end + len(value_end)
        return end >= 0


def arguments_text(parameters: dict[str, str], schema: Any, *, is_complete: bool) -> str:
    """Return the JSON text of an object with these parameters, open at its end unless `is_complete`."""
    items = [f"{json.dumps(key)}: {value_text(text, schema, key)}" for key, text in parameters.items()]
    return f"{{{', '.join(items)}}}" if is_complete else "{" * bool(items) + ", ".join(items)


def value_text(text: str, schema: Any, key: str) -> str:
    """Return a parameter's value as JSON. `schema`: that of all parameters."""
    as_string = without_lone_surrogates(json.dumps(text, ensure_ascii=False))
    literal = PRINTED.get(text.strip(), text.strip())
    try:
        value = read(literal)
    except ValueError:
        return as_string
    options = [(without_lone_surrogates(literal), value), (as_string, text)]
    if isinstance(value, str):  # quotes in a text are its own
        options.reverse()
    return next((written for written, option in options if fits_member(option, schema, key)), options[0][0])
