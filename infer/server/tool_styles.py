"""How families of models write tool calls: Hermes and Qwen, Llama 3, Mistral. Each style is one row of a table.

A style says where calls begin, how one is read, and by what grammar one can be forced. Calls are read from JSON by a
scanner that looks at every character once; nothing a model writes reaches a regular expression or `eval`.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.grammar import JSON_OPTIONS, Grammar
from infer.server.tool_protocol import FunctionTool

MAX_FORCED_CALLS = 8
ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class ToolStyle:
    name: str
    begin: str  # before each call, or before the list of them
    end: str = ""  # after each call
    argument_key: str = "arguments"
    bare: bool = False  # a text that begins with a JSON object may be a call, without `begin`
    named: bool = False  # `begin`, a name, `separator` and the arguments alone are a call as well
    separator: str = ""
    short_ids: bool = False

    def new_id(self) -> str:
        """Mistral's templates take nothing but nine letters and digits."""
        if self.short_ids:
            return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def calls_in(self, value: Any, known: set[str]) -> list[Call] | None:
        """The calls that a JSON value is, or None: then it is text like any other."""
        values = value if isinstance(value, list) else [value]
        calls = []
        for item in values:
            name = item.get("name") if isinstance(item, dict) else None
            if not isinstance(name, str) or name not in known:
                return None
            arguments = item.get(self.argument_key, item.get("arguments", item.get("parameters", {})))
            if not isinstance(arguments, str):  # as which some models write them, like OpenAI's API
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(name, arguments))
        return calls or None

    def grammar(self, tools: Sequence[FunctionTool], *, parallel: bool, begin_id: int | None) -> Grammar:
        """Text of one call or several, and nothing else. `begin_id`: where `begin` is a special token."""
        schemas = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, self.argument_key: tool.parameters or {"type": "object"}},
                "required": ["name", self.argument_key],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        call = {"anyOf": schemas, "x-guidance": JSON_OPTIONS}
        most = MAX_FORCED_CALLS if parallel else 1
        begin = json.dumps(self.begin) if begin_id is None else f"<[{begin_id}]>"
        if self.name == "mistral":
            calls = {"type": "array", "items": {"anyOf": schemas}, "minItems": 1, "maxItems": most}
            calls["x-guidance"] = JSON_OPTIONS
            return Grammar("lark", f"start: {begin} calls\ncalls: %json {json.dumps(calls)}")
        if self.bare:
            more = f' (";" call){{0,{most - 1}}}' if most > 1 else ""
            return Grammar("lark", f"start: call{more}\ncall: %json {json.dumps(call)}")
        end = json.dumps("\n" + self.end)
        rule = f'start: one ("\\n" one){{0,{most - 1}}}' if most > 1 else "start: one"
        return Grammar("lark", f'{rule}\none: {begin} "\\n" call {end}\ncall: %json {json.dumps(call)}')


STYLES = {
    style.name: style
    for style in (
        ToolStyle("hermes", begin="<tool_call>", end="</tool_call>"),
        ToolStyle("llama3", begin="<|python_tag|>", argument_key="parameters", bare=True),
        ToolStyle("mistral", begin="[TOOL_CALLS]", named=True, separator="[ARGS]", short_ids=True),
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
