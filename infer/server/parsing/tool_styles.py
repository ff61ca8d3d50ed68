"""Tool-call formats of model families: Hermes and Qwen, Llama 3, Mistral, gpt-oss. Each style is one row of a table.

A style defines where calls begin, how a call is parsed, and the grammar that forces one. Calls are parsed from JSON by
a scanner that reads every character once; no model output reaches a regular expression or `eval`.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from infer.sampling.grammar import JSON_OPTIONS, Grammar, check_numbers
from infer.server.protocol.tools import FunctionTool
from models.json_text import elements, members, read, value_end, without_lone_surrogates

MAX_FORCED_CALLS = 8
ALPHANUMERIC = string.ascii_letters + string.digits
CALL_KEYS = ("name", "arguments", "parameters", "type", "id")  # of a call without marks


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # text of a JSON object
    complete: bool = True  # False: the output was truncated, and the arguments are incomplete


@dataclass(frozen=True)
class ToolStyle:
    name: str
    begin: str  # mark before each call, or before the list of them
    end: str = ""  # mark after each call
    argument_key: str = "arguments"
    bare: bool = False  # text that begins with a JSON object may be a call without `begin`
    named: bool = False  # `begin`, name, `separator`, arguments is also a call
    separator: str = ""
    listed: bool = False  # forced calls form a JSON list
    route: str = ""  # precedes the name in a header of its own, after which come the arguments alone (harmony.py)
    short_ids: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that must appear in the text even if they are special tokens."""
        return tuple(mark for mark in (self.begin, self.end, self.separator) if mark)

    def new_id(self) -> str:
        """Return a new call id. Mistral's templates accept exactly nine letters and digits."""
        if self.short_ids:
            return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def calls_in(
        self,
        text: str,
        names: Collection[str],
        *,
        is_complete: bool = True,
        trusted: bool = False,
        unmarked: bool = False,
    ) -> list[Call] | None:
        """Return the calls in a JSON value, or None if it is ordinary text.

        If it is truncated (`is_complete` false), the last call may be incomplete, and one whose name is incomplete is
        dropped. `trusted`: a grammar guarantees valid JSON, so neither validity nor depth is checked. `unmarked`:
        nothing else says that this is a call, so it must have a name, arguments, and no keys that a call does not have.
        """
        try:
            if is_complete and not trusted:
                read(text)
            for item, _ in self._items(text) if unmarked else ():
                keys = {key for key, *_ in members(item)} if item.startswith("{") else set()
                if "name" not in keys or not keys <= set(CALL_KEYS) or keys.isdisjoint(self._argument_keys):
                    return None
            calls = [
                self._call(item, names, is_complete=is_complete or whole, strict=not is_complete and not trusted)
                for item, whole in self._items(text)
            ]
        except ValueError:
            return None
        kept = [call for call in calls if call is not None]
        return kept if kept or not is_complete else None

    def grammar(self, tools: Sequence[FunctionTool], *, most: int, token_id: Callable[[str], int | None]) -> Grammar:
        """Return a grammar that allows one to `most` calls and nothing else.

        `token_id` returns the id of a mark that is one token of the vocabulary: llguidance treats most as special,
        whatever the tokenizer says, and then matches them by reference only. Each tool's schema is a separate JSON
        document, so that its references resolve inside it. Raises ValueError naming a tool whose parameters are not an
        object, or hold a number that cannot be kept.
        """

        def mark(text: str) -> str:
            token = token_id(text)
            return json.dumps(text) if token is None else f"<[{token}]>"

        def calls(separator: str) -> str:
            return f"call ({json.dumps(separator)} call){{0,{most - 1}}}" if most > 1 else "call"

        begin, start, call = mark(self.begin), calls("\n"), "object"
        if self.listed:
            start = f'{begin} "[" {calls(", ")} "]"'
        elif self.bare:
            start = calls("; ")
        elif self.route:  # a call ends the answer
            start = "object"
        else:
            call = f'{begin} "\\n" object "\\n" {mark(self.end)}'
        rules = [f"start: {start}", f"call: {call}", "object: " + " | ".join(f"object_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            before = f'{{"name": {json.dumps(tool.name)}, {json.dumps(self.argument_key)}: '
            check_numbers(tool.arguments_schema, f"the parameters of {tool.name}")
            schema = tool.arguments_schema | {"x-guidance": JSON_OPTIONS}
            whole = f'{json.dumps(before)} arguments_{i} "}}"'
            if self.route:
                header = f'{json.dumps(f"{self.route}{tool.name} ")} {mark(self.separator)} "json" {mark(self.end)}'
                whole = f"{begin} {header} arguments_{i}"
            rules += [
                f"object_{i}: {whole}",
                f"arguments_{i}: %json {json.dumps(schema)}",
            ]
        return Grammar("calls", "\n".join(rules))

    @staticmethod
    def _items(text: str) -> Iterator[tuple[str, bool]]:
        """Yield the elements of a list, or the object itself, each with whether it is complete."""
        return elements(text) if text.startswith("[") else iter([(text, value_end(text, 0) is not None)])

    def _call(self, text: str, names: Collection[str], *, is_complete: bool, strict: bool = False) -> Call | None:
        """Parse one call. None if the text ends before the name does. Raises ValueError if it is no call."""
        if not text.startswith("{"):
            raise ValueError("no object")
        if strict and is_complete:
            read(text)
        values: dict[str, tuple[str, bool]] = {}
        for key, value, value_complete in members(text):
            if key in values and key in ("name", *self._argument_keys):
                raise ValueError(f"{key} stands there twice")
            values[key] = value, value_complete
        name, name_complete = values.pop("name", ("", False))
        if not name_complete:
            if is_complete or values.keys() - {*self._argument_keys, "id", "type"}:
                raise ValueError("no name")
            if not any(json.dumps(tool).startswith(name) for tool in names):
                raise ValueError("no tool's name")
            return None
        function = json.loads(name)
        if not isinstance(function, str) or function not in names:
            raise ValueError("no tool's name")
        key = next((key for key in self._argument_keys if key in values), None)
        if key is None:
            return Call(function, "{}") if is_complete else Call(function, "", complete=False)
        return arguments_call(function, *values[key], strict=strict)

    @property
    def _argument_keys(self) -> tuple[str, ...]:
        return (self.argument_key, *(key for key in ("arguments", "parameters") if key != self.argument_key))


def arguments_call(function: str, value: str, is_complete: bool, *, strict: bool) -> Call:
    """Return a call whose arguments are the model's exact text, except that lone surrogates are replaced.

    Some models write the arguments as a string, like OpenAI's API. Raises ValueError if they are neither an object nor
    null.
    """
    if strict and is_complete:
        read(value)
    if value.startswith('"'):
        value = json.loads(value) if is_complete else unfinished_string(value)
        if not is_complete and not value.strip():
            return Call(function, "", complete=False)
        if is_complete and value.strip() and not isinstance(read(value), dict):
            raise ValueError("no object")
    value = value.strip()
    if value in ("", "null") and is_complete:
        return Call(function, "{}")
    if not value.startswith("{"):
        if is_complete or not "null".startswith(value):
            raise ValueError("no object")
        value = ""
    return Call(function, without_lone_surrogates(value), complete=is_complete)


def unfinished_string(text: str) -> str:
    """Decode a truncated JSON string as far as it goes. Raises ValueError if it is no string."""
    for end in range(len(text), max(len(text) - len("\\uXXXX"), 0), -1):  # its last escape may be incomplete
        try:
            return json.loads(text[:end] + '"')
        except ValueError:
            continue
    raise ValueError("no string")


STYLES = {
    style.name: style
    for style in (
        ToolStyle("hermes", begin="<tool_call>", end="</tool_call>"),
        ToolStyle("llama3", begin="<|python_tag|>", argument_key="parameters", bare=True),
        ToolStyle("mistral", begin="[TOOL_CALLS]", named=True, separator="[ARGS]", listed=True, short_ids=True),
        ToolStyle(
            "harmony",
            begin="<|channel|>",
            separator="<|constrain|>",
            end="<|message|>",
            route="commentary to=functions.",
        ),
    )
}


MARKS = {  # texts of a chat template that show its style
    "harmony": ("<|channel|>",),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
}


def style_of(template: str | None) -> ToolStyle | None:
    """Detect the style from a chat template. None if the template does not support tools, or its style is unknown."""
    if template is None or "tools" not in template:
        return None
    for name, marks in MARKS.items():
        if any(mark in template for mark in marks):
            return STYLES[name]
    return STYLES["llama3"] if "<|python_tag|>" in template or '"parameters":' in template else None
