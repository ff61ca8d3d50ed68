"""Built-in prompts for chat models (data=chat): questions about Python's library and everyday questions.

    functions of the standard library   "Explain what this function does", "Write a function that ..."
    pydoc's topics                      "Explain this part of Python's documentation"
    tasks of subjects                   advice, stories, comparisons, lists

Rows have the form {"prompt": ...}; the kinds alternate. Rows are split as in the demo corpus, by a hash of file, topic
or question, so the split is the same everywhere. Code and topics come from the running Python's standard library.
"""

from __future__ import annotations

import ast
import json
import random
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product, tee
from pathlib import Path
from typing import TypeVar

from models.demo.corpus import is_held_out, read_split
from train.data.entries import Item, cut_text, in_turn

LONGEST = 900  # characters of code or documentation in a prompt
PER_FILE = 8  # at most so many functions of a file, so that long files do not dominate
TEXTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
T = TypeVar("T")


def builtin_items(*, held_out: bool) -> Iterator[Item]:
    def of_kind(kind: int, items: Iterable[tuple[str, tuple[str, str]]]) -> Iterator[Item]:
        return (Item(place, {"prompt": prompts[kind]}) for place, prompts in items if prompts[kind])

    first, second = tee(functions(held_out))  # a file is parsed once
    return in_turn((of_kind(0, first), documentation(held_out), questions(held_out), of_kind(1, second)))


def documentation(held_out: bool) -> Iterator[Item]:
    from pydoc_data.topics import topics

    chosen = [(name, text) for name, text in sorted(topics.items()) if is_held_out(name) == held_out]
    pieces = [(name, piece) for name, text in chosen for piece in cut_text(text, LONGEST) if len(piece) > LONGEST // 3]
    for name, piece in shuffled(pieces):
        yield Item(f"help({name!r})", {"prompt": TEXTS["documentation"].format(piece)})


def questions(held_out: bool) -> Iterator[Item]:
    texts = [task.format(subject) for task, subject in product(TEXTS["tasks"], TEXTS["subjects"])]
    for text in shuffled([text for text in texts if is_held_out(text) == held_out]):
        yield Item("built-in question", {"prompt": text})


def functions(held_out: bool) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield file name and prompts for every function with a docstring; files are parsed lazily."""
    for document in shuffled(read_split("held_out" if held_out else "train")):
        for function in islice(documented(document.text), PER_FILE):
            yield document.name, function


def documented(text: str) -> Iterator[tuple[str, str]]:
    """Yield two prompts for each function of a module that has a docstring: to explain it, and to write it.

    An empty one where that would be too long. Methods are not to be written, which a docstring does not describe
    without their class. Nothing is yielded for a module that does not parse, as some template files.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            arguments = ast.unparse(node.args)
            described = len(docstring) <= LONGEST and not arguments.startswith(("self", "cls"))
            write = TEXTS["write"].format(f"{node.name}({arguments})", docstring) if described else ""
            yield TEXTS["explain"].format(source) if len(source) <= LONGEST else "", write


def shuffled(items: Iterable[T]) -> Sequence[T]:
    """Return the items shuffled with a fixed seed, in the same order everywhere."""
    order = list(items)
    random.Random(0).shuffle(order)
    return order
