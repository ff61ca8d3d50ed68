"""Entries of data.path that are more than a path: which rows to take, and how to make a prompt of each.

    {path: mbpp.jsonl, lines: [601, 974]}                                     rows 601 to 974
    {path: books.jsonl.xz, chunk: {text: 900}, rows: 400,                     400 pieces of up to 900 characters
     template: "Continue this text:\n\n{text}"}
    {path: faq.jsonl, columns: {prompt: question}}                            column names of this file only

Order of application: `lines` selects rows by number, `chunk` cuts each into pieces, `rows` draws a sample, `template`
makes the prompt of each from its columns; of the others those in BESIDE are kept, unless it names them. The sample is
drawn by a hash of the row's number, so it is the same everywhere and a larger sample contains a smaller one.
Independent of file formats and of the forms of a row.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from train.config import TEMPLATE_FIELD, as_list
from train.data.examples import content_key, renamed

BESIDE = ("system", "tools", "response")  # columns that a row may have beside its prompt


class Item(NamedTuple):
    place: str  # file and line, or data set and row
    row: Any
    error: str | None = None  # why the row could not be read


def in_turn(parts: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """Yield a row of each part in turn (round robin); exhausted parts are skipped."""
    for rows in zip_longest(*parts):
        yield from (row for row in rows if row is not None)


def shaped(items: Iterable[Item], entry: Mapping[str, Any], columns: Mapping[str, Any] | None) -> Iterator[Item]:
    """Apply an entry's options to its items. Items without a row pass unchanged. `columns`: those of all sources."""
    if "lines" in entry:
        first, last = entry["lines"]
        items = islice(items, first - 1, last)
    if "chunk" in entry:
        items = chunked(items, entry["chunk"])
    if "rows" in entry:
        items = draw(items, entry["rows"])
    for item in items:
        if not isinstance(item.row, Mapping):
            yield item
            continue
        row = renamed(item.row, entry.get("columns"))
        try:
            yield item._replace(row=prompted(row, entry, columns or {}) if "template" in entry else row)
        except ValueError as error:
            yield Item(item.place, None, str(error))


def draw(items: Iterable[Item], count: int) -> list[Item]:
    """Return a sample of `count` items by hash, in the original order."""
    drawn = heapq.nsmallest(count, enumerate(items), key=lambda numbered: content_key(numbered[0]))
    return [item for _, item in sorted(drawn, key=lambda numbered: numbered[0])]


def chunked(items: Iterable[Item], chunk: Mapping[str, int]) -> Iterator[Item]:
    """Yield a row for each piece of the texts in the columns of `chunk` (column to number of characters)."""
    for item in items:
        pieces = [item]
        for column, characters in chunk.items():
            pieces = [piece for part in pieces for piece in cut_row(part, column, characters)]
        yield from pieces


def cut_row(item: Item, column: str, characters: int) -> list[Item]:
    if not isinstance(item.row, Mapping) or not isinstance(item.row.get(column), str):
        return [item]
    pieces = enumerate(cut_text(item.row[column], characters), start=1)
    return [Item(f"{item.place}, piece {number}", {**item.row, column: piece}) for number, piece in pieces]


def cut_text(text: str, characters: int) -> list[str]:
    """Split a text into pieces of at most `characters`.

    Paragraphs are joined up to that length; a longer paragraph is cut between words, a longer word anywhere.
    """
    pieces: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = paragraph.strip("\n")
        if pieces and len(pieces[-1]) + 2 + len(paragraph) <= characters:
            pieces[-1] += f"\n\n{paragraph}"
            continue
        while len(paragraph) > characters:
            end = paragraph.rfind(" ", 1, characters + 1)
            end = characters if end < 0 else end
            pieces.append(paragraph[:end])
            paragraph = paragraph[end:].lstrip(" ")
        if paragraph.strip():
            pieces.append(paragraph)
    return pieces


def prompted(row: Mapping[str, Any], entry: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row that the entry's template makes, with those of the columns BESIDE that it does not name."""
    used, columns = set(TEMPLATE_FIELD.findall(entry["template"])), {**columns, **(entry.get("columns") or {})}
    names = {name: [*as_list(columns.get(name, [])), name] for name in BESIDE}
    kept = renamed(row, names)
    others = {name: kept[name] for name in BESIDE if name in kept and not used & {*names[name]}}
    return {"prompt": fill(entry["template"], row), **others}


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Replace `{column}` by the row's text; other braces stay. Raises ValueError if a column holds no text."""

    def text(match: re.Match[str]) -> str:
        value = row.get(match[1])
        if not isinstance(value, str):
            raise ValueError(f"the template names {match[1]}, which holds no text here; it has {', '.join(row)}")
        return value.strip("\n")

    return TEMPLATE_FIELD.sub(text, template)
