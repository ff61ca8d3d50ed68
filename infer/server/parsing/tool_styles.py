"""How families of models write tool calls: Hermes and Qwen, Llama 3, Mistral. Each style is one row of a table.

A style says where calls begin, how one is read, and by what grammar one can be forced. Calls are read from JSON by a
scanner that looks at every character once; nothing a model writes reaches a regular expression or `eval`.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from infer.sampling.grammar import JSON_OPTIONS, Grammar
from infer.server.protocol.tools import FunctionTool
from models.json_text import elements, members, read, value_end, without_lone_surrogates

MAX_FORCED_CALLS = 8
ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON of an object
    complete: bool = True  # False: the answer was cut, and the arguments break off


@dataclass(frozen=True)
class ToolStyle:
    name: str
    begin: str  # before each call, or before the list of them
    end: str = ""  # after each call
    argument_key: str = "arguments"
    bare: bool = False  # a text that begins with a JSON object may be a call, without `begin`
    named: bool = False  # `begin`, a name, `separator` and the arguments alone are a call as well
    separator: str = ""
    listed: bool = False  # calls that are forced are a JSON list
    short_ids: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and must be seen all the same."""
        return tuple(mark for mark in (self.begin, self.end, self.separator) if mark)

    def new_id(self) -> str:
        """Mistral's templates take nothing but nine letters and digits."""
        if self.short_ids:
            return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def calls_in(self, text: str, names: set[str], *, trusted: bool = False) -> list[Call] | None:
        """The calls that a whole JSON value is, or None: then it is text like any other.

        `trusted`: a grammar has made sure that it is valid JSON, however deep it may be.
        """
        try:
            if not trusted:
                read(text)
            calls = [self._call(item, names, whole=True) for item, _ in self._items(text)]
        except ValueError:
            return None
        return [call for call in calls if call is not None] or None

    def begun_calls(self, text: str, names: set[str], *, trusted: bool = False) -> list[Call] | None:
        """Those of a JSON value that breaks off; the last one may be cut. None: calls do not begin like this.

        A call whose name is not there yet is left out.
        """
        try:
            calls = [self._call(item, names, whole=whole, strict=not trusted) for item, whole in self._items(text)]
        except ValueError:
            return None
        return [call for call in calls if call is not None]

    def grammar(self, tools: Sequence[FunctionTool], *, most: int, special_id: Callable[[str], int | None]) -> Grammar:
        """Text of one call or up to `most`, and nothing else. `special_id`: of a mark that is a special token.

        Each tool's schema is a JSON document of its own, so its references stay inside it. Raises ValueError naming
        the tool whose parameters are no object's.
        """

        def mark(text: str) -> str:
            token = special_id(text)
            return json.dumps(text) if token is None else f"<[{token}]>"

        def calls(separator: str) -> str:
            return f"call ({json.dumps(separator)} call){{0,{most - 1}}}" if most > 1 else "call"

        begin, start, call = mark(self.begin), calls("\n"), "object"
        if self.listed:
            start = f'{begin} "[" {calls(", ")} "]"'
        elif self.bare:
            start = calls("; ")
        else:
            call = f'{begin} "\\n" object "\\n" {mark(self.end)}'
        rules = [f"start: {start}", f"call: {call}", "object: " + " | ".join(f"object_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            before = f'{{"name": {json.dumps(tool.name)}, {json.dumps(self.argument_key)}: '
            schema = tool.arguments_schema | {"x-guidance": JSON_OPTIONS}
            rules += [
                f'object_{i}: {json.dumps(before)} arguments_{i} "}}"',
                f"arguments_{i}: %json {json.dumps(schema)}",
            ]
        return Grammar("lark", "\n".join(rules))

    @staticmethod
    def _items(text: str) -> Iterator[tuple[str, bool]]:
        """Of a list, its elements; of an object, itself; each with whether it is whole."""
        return elements(text) if text.startswith("[") else iter([(text, value_end(text, 0) is not None)])

    def _call(self, text: str, names: set[str], *, whole: bool, strict: bool = False) -> Call | None:
        """None where the text breaks off before the end of the name. Raises ValueError for what is no call."""
        if not text.startswith("{"):
            raise ValueError("no object")
        if strict and whole:
            read(text)
        values: dict[str, tuple[str, bool]] = {}
        for key, value, value_whole in members(text):
            if key in values and key in ("name", *self._argument_keys):
                raise ValueError(f"{key} stands there twice")
            values[key] = value, value_whole
        name, name_whole = values.pop("name", ("", False))
        if not name_whole:
            if whole or values.keys() - {*self._argument_keys, "id", "type"}:
                raise ValueError("no name")
            if not any(json.dumps(tool).startswith(name) for tool in names):
                raise ValueError("no tool's name")
            return None
        function = json.loads(name)
        if not isinstance(function, str) or function not in names:
            raise ValueError("no tool's name")
        key = next((key for key in self._argument_keys if key in values), None)
        if key is None:
            return Call(function, "{}") if whole else Call(function, "", complete=False)
        return arguments_call(function, *values[key], strict=strict)

    @property
    def _argument_keys(self) -> tuple[str, ...]:
        return (self.argument_key, *(key for key in ("arguments", "parameters") if key != self.argument_key))


def arguments_call(function: str, value: str, whole: bool, *, strict: bool) -> Call:
    """Arguments stay as the model wrote them, to the character, but for half surrogate pairs.

    Some models write them as a string, like OpenAI's API. Raises ValueError for what is neither an object nor null.
    """
    if strict and whole:
        read(value)
    if value.startswith('"'):
        value = json.loads(value) if whole else unfinished_string(value)
        if not whole and not value.strip():
            return Call(function, "", complete=False)
        if whole and value.strip() and not isinstance(read(value), dict):
            raise ValueError("no object")
    value = value.strip()
    if value in ("", "null") and whole:
        return Call(function, "{}")
    if not value.startswith("{"):
        if whole or not "null".startswith(value):
            raise ValueError("no object")
        value = ""
    return Call(function, without_lone_surrogates(value), complete=whole)


def unfinished_string(text: str) -> str:
    """What a JSON string that breaks off says so far. Raises ValueError."""
    for end in range(len(text), max(len(text) - len("\\uXXXX"), 0), -1):  # its last escape may be torn
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
    )
}


def style_of(template: str | None) -> ToolStyle | None:
    """What a chat template shows of its model's style; None where it knows no tools."""
    if template is None or "tools" not in template:
        return None
    for name, marks in (("hermes", ("<tool_call>",)), ("mistral", ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"))):
        if any(mark in template for mark in marks):
            return STYLES[name]
    return STYLES["llama3"] if "<|python_tag|>" in template or '"parameters":' in template else None
