"""Tool-call formats of model families. Each style is one row of a table, of which the server's manual has a copy.

A style defines how calls are told from other text, how one is parsed, and the text of one that is forced
(call_grammar.py). Calls are parsed by scanners that read every character once; no model output reaches a regular
expression or `eval`.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from infer.server.parsing.tagged_arguments import Tags
from models.json_text import elements, members, read, value_end, without_lone_surrogates

MAX_FORCED_CALLS = 8
ALPHANUMERIC = string.ascii_letters + string.digits
CALL_KEYS = ("name", "arguments", "parameters", "type", "id")  # of a call without marks
CALL_ID = "[CALL_ID]"  # an id follows it
OBJECT = '{"name": "$name", "arguments": $arguments}'


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # text of a JSON object
    complete: bool = True  # False: the output was truncated, and the arguments are incomplete


@dataclass(frozen=True)
class ToolStyle:
    name: str
    families: str  # whose published chat templates have this style
    shown_by: tuple[tuple[str, ...], ...]  # texts of a chat template: all of one of these say that it has this style
    begins: tuple[str, ...]  # each begins a call, or a list of them
    ends: tuple[str, ...] = ()  # each may follow a call, in this order
    before: tuple[str, ...] = ()  # each may precede a name outside JSON, in this order
    after: tuple[str, ...] = ()  # each may follow it
    named: bool = False  # a name outside JSON and its arguments are also a call
    tags: Tags | None = None  # of arguments that are not JSON
    argument_key: str = "arguments"
    bare: bool = False  # text that begins with a JSON object may be a call without marks
    short_ids: bool = False
    # a forced call as the templates write it, and what stands before the first, between two and after the last
    form: str = OBJECT
    opening: str = ""
    separator: str = ""
    closing: str = ""
    most: int = MAX_FORCED_CALLS  # forced calls in an answer

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that must appear in the text even if they are special tokens."""
        tags = () if self.tags is None else self.tags.marks
        return tuple(dict.fromkeys((*self.begins, *self.before, *self.after, *tags, *self.ends)))

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


DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
STYLES = {
    style.name: style
    for style in (
        ToolStyle(
            "harmony",
            "gpt-oss",
            shown_by=(("<|channel|>",),),
            begins=("<|channel|>",),
            ends=("<|constrain|>", "<|message|>"),
            form="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
            most=1,  # a call ends the answer
        ),
        ToolStyle(
            "qwen3_coder",
            "Qwen3-Coder, Qwen3.5, Nemotron 3",
            shown_by=(("<tool_call>", "<function="),),
            begins=("<tool_call>", "<function="),
            before=("<function=",),
            after=(">",),
            ends=("</function>", "</tool_call>"),
            named=True,
            tags=Tags("<parameter=$key>\n$value\n</parameter>\n"),
            form="<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
            separator="\n",
        ),
        ToolStyle(
            "glm45",
            "GLM-4.5 and later",
            shown_by=(("<tool_call>", "<arg_key>"),),
            begins=("<tool_call>",),
            ends=("</tool_call>",),
            named=True,
            tags=Tags("<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n"),
            form="<tool_call>$name\n$arguments</tool_call>",
            separator="\n",
        ),
        ToolStyle(
            "minimax_m2",
            "MiniMax-M2",
            shown_by=(("<minimax:tool_call>",),),
            begins=("<minimax:tool_call>", "<invoke"),
            before=("<invoke", 'name="'),
            after=('">',),
            ends=("</invoke>", "</minimax:tool_call>"),
            named=True,
            tags=Tags('<parameter name="$key">$value</parameter>'),
            form='<invoke name="$name">$arguments</invoke>\n',
            opening="<minimax:tool_call>\n",
            closing="</minimax:tool_call>",
        ),
        ToolStyle(
            "hermes",
            "Hermes, Qwen2.5, Qwen3, MiMo, Granite 4",
            shown_by=(("<tool_call>",),),
            begins=("<tool_call>",),
            ends=("</tool_call>",),
            form=f"<tool_call>\n{OBJECT}\n</tool_call>",
            separator="\n",
        ),
        ToolStyle(
            "mistral_args",
            "Mistral since Small 3.2",
            shown_by=(("[TOOL_CALLS]", "[ARGS]"),),
            begins=("[TOOL_CALLS]",),
            after=(CALL_ID, "[ARGS]"),
            named=True,
            short_ids=True,
            form="[TOOL_CALLS]$name[ARGS]$arguments",
        ),
        ToolStyle(
            "mistral",
            "Mistral 7B 0.3 to Small 3.1",
            shown_by=(("[TOOL_CALLS]",), ("[AVAILABLE_TOOLS]",)),
            begins=("[TOOL_CALLS]",),
            after=("[ARGS]",),
            named=True,
            short_ids=True,
            opening="[TOOL_CALLS][",
            separator=", ",
            closing="]",
        ),
        ToolStyle(
            "phi4_mini",
            "Phi-4-mini",
            shown_by=(("<|tool|>",), ("<|/tool_call|>",)),
            begins=("<|tool_call|>", "functools"),
            ends=("<|/tool_call|>",),
            opening="<|tool_call|>[",
            separator=", ",
            closing="]<|/tool_call|>",
        ),
        ToolStyle(
            "granite",
            "Granite 3.0 to 3.3",
            shown_by=(("<|tool_call|>",),),
            begins=("<|tool_call|>",),
            opening="<|tool_call|>[",
            separator=", ",
            closing="]",
        ),
        ToolStyle(
            "deepseek_v3",
            "DeepSeek-V3, DeepSeek-R1",
            shown_by=((DEEPSEEK[0], "```json"),),
            begins=DEEPSEEK[:2],
            before=(DEEPSEEK[1], "function", DEEPSEEK[2]),
            after=("```json",),
            ends=("```", *DEEPSEEK[3:]),
            named=True,
            form=f"{DEEPSEEK[1]}function{DEEPSEEK[2]}$name\n```json\n$arguments\n```{DEEPSEEK[3]}",
            opening=DEEPSEEK[0],
            separator="\n",
            closing=DEEPSEEK[4],
        ),
        ToolStyle(
            "deepseek_v31",
            "DeepSeek-V3.1",
            shown_by=((DEEPSEEK[0],),),
            begins=DEEPSEEK[:2],
            before=(DEEPSEEK[1],),
            after=(DEEPSEEK[2],),
            ends=DEEPSEEK[3:],
            named=True,
            form=f"{DEEPSEEK[1]}$name{DEEPSEEK[2]}$arguments{DEEPSEEK[3]}",
            opening=DEEPSEEK[0],
            closing=DEEPSEEK[4],
        ),
        ToolStyle(
            "llama3",
            "Llama 3.1, 3.2, 3.3",
            shown_by=(("<|python_tag|>",), ('"parameters":',)),
            begins=("<|python_tag|>",),
            argument_key="parameters",
            bare=True,
            form='{"name": "$name", "parameters": $arguments}',
            separator="; ",
        ),
    )
}
