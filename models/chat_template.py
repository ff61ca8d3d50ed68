"""One chat template: Jinja set up as in transformers, in a sandbox, and detection of the input forms it accepts.

Templates disagree about the form of their input: content as a string or as a list of parts, a call's arguments as an
object or as JSON text, a message without content, the developer role. What a template accepts is determined by
rendering small probe conversations with it, so that no list of models is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

PROBE, SECOND, CALL_NAME = "headway-probe", "headway-second", "probe"
QUESTION = {"role": "user", "content": "headway-question"}
CALL_ID = "headway00"  # nine letters and digits: Mistral's templates refuse any other
LONG_ID = "headway_0123456789"


class ContentForm(NamedTuple):
    """How a template reads the content of messages of one role."""

    strings: bool = True
    parts: bool = False  # a list of {"type": "text", "text": ...}


class CallForm(NamedTuple):
    """How a template reads a message with tool calls."""

    arguments_as_text: bool = False
    without_content: Mapping[str, Any] = {"content": ""}  # fields to set where the message's content is null


class Template:
    """A chat template, safe to share between threads. `special_tokens`: name -> text, variables of every rendering."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], source: str) -> None:
        self.text, self._special_tokens, self._source = text, special_tokens, source
        self._content_forms: dict[str, ContentForm] = {}
        self._shown: dict[tuple[tuple[str, ...], int], bool] = {}
        self._taken_ids: dict[str | None, bool] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the rendered text. Raises ValueError where the template refuses the messages or is not valid Jinja."""
        variables = {
            **self._special_tokens,
            **(options or {}),
            "messages": list(messages),
            "tools": tools,  # None where there are none: templates ask `tools is not none`
            "documents": documents,
            "add_generation_prompt": generation_prompt,
        }
        compiled = self._compiled
        try:
            return compiled.render(variables)
        except Exception as error:  # a template is a program of the checkpoint and may raise anything
            raise ValueError(f"messages: the model's chat template refuses them ({error})") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return chat_environment().from_string(self.text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"{self._source}: the chat template is not valid Jinja ({error})") from error

    def content_form(self, role: str) -> ContentForm:
        if role not in self._content_forms:
            self._content_forms[role] = self._probe_content(role)
        return self._content_forms[role]

    def _probe_content(self, role: str) -> ContentForm:
        contents = (PROBE, [text_part(PROBE)], [text_part(PROBE), text_part(SECOND)])
        as_string, as_part, as_parts = (self._probe(self._probe_messages(role, content)) for content in contents)
        strings = as_string is not None or as_part is None
        # a template that merely prints the list of parts as a value renders another text than for the string
        parts = as_parts is not None and SECOND in as_parts and (as_part == as_string or not strings)
        return ContentForm(strings, parts)

    def _probe_messages(self, role: str, content: Any) -> list[dict[str, Any]]:
        message = {"role": role, "content": content}
        if role in ("system", "developer"):
            return [message, QUESTION]
        if role == "assistant":
            return [QUESTION, message]
        if role == "tool":
            assistant_content = SECOND if self.content_form("assistant").strings else [text_part(SECOND)]
            call = {"role": "assistant", "content": assistant_content, "tool_calls": [self._probe_call()]}
            return [QUESTION, call, {**message, "tool_call_id": CALL_ID}]
        return [message]

    @cached_property
    def knows_developer(self) -> bool:
        """False where the template would refuse or leave out a developer message."""
        return any(self._probe(self._probe_messages("developer", content)) for content in (PROBE, [text_part(PROBE)]))

    def shows(self, roles: tuple[str, ...], at: int) -> bool:
        """Return whether a conversation of turns of these roles is rendered with the text of the turn at index `at`."""
        if (roles, at) not in self._shown:
            texts = [(role, PROBE if index == at else SECOND) for index, role in enumerate(roles)]
            contents = [(role, text if self.content_form(role).strings else [text_part(text)]) for role, text in texts]
            turns = [{"role": role, "content": content} for role, content in contents]
            self._shown[roles, at] = self._probe(turns) is not None
        return self._shown[roles, at]

    def takes_id(self, identity: str | None) -> bool:
        """Return whether a call and its result may have this id, or None, also if it takes neither with any id."""
        if identity not in self._taken_ids:
            call = {**self._probe_call(), "id": identity}
            result = {"role": "tool", "content": SECOND, "tool_call_id": identity}
            if identity is None:
                del call["id"], result["tool_call_id"]
            if not self.content_form("tool").strings:
                result["content"] = [text_part(SECOND)]
            assistant = {"role": "assistant", **self.call_form.without_content, "tool_calls": [call]}
            taken = self._probe([QUESTION, assistant, result]) is not None
            self._taken_ids[identity] = taken or (identity != CALL_ID and not self.takes_id(CALL_ID))
        return self._taken_ids[identity]

    @cached_property
    def turn_end(self) -> str:
        """What is rendered after an assistant's content, whatever follows; empty if the template refuses to show it."""
        answer = PROBE if self.content_form("assistant").strings else [text_part(PROBE)]
        turn = self._probe_messages("assistant", answer)
        texts = [self._probe([*turn, *after]) for after in ([], [QUESTION])]
        return os.path.commonprefix([text.rpartition(PROBE)[2] for text in texts if text is not None])  # noqa: RUF071

    @cached_property
    def call_form(self) -> CallForm:
        """The first form that the template renders with the call in it; preferably one that omits a null content."""
        for as_text in (False, True):
            empty = self._probe(self._call_messages({"content": ""}, as_text))
            for content in ({}, {"content": None}):
                text = self._probe(self._call_messages(content, as_text))
                if text is not None and (empty is None or nulls(text) <= nulls(empty)):
                    return CallForm(as_text, content)
            if empty is not None:
                return CallForm(as_text, {"content": ""})
        return CallForm()

    @property
    def call_text(self) -> str:
        """What is rendered after a question for a call of CALL_NAME; empty if the template shows no calls."""
        form = self.call_form
        text = self._probe(self._call_messages(form.without_content, form.arguments_as_text))
        return (text or "").rpartition(QUESTION["content"])[2]

    @cached_property
    def tools_in_system(self) -> bool:
        """Whether tools are read from a field of the system message (Phi-4-mini), as JSON text of their functions."""
        system = {"role": "system", "content": SECOND}
        shown = [self._probe([{**system, field: PROBE}, QUESTION]) is not None for field in ("tools", SECOND)]
        return shown == [True, False]  # a template that prints whole messages shows any field

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the prompt depends on the tools; True also if the template refuses the probe."""
        parameters = {"type": "object", "properties": {"probe": {"type": "string"}}, "required": ["probe"]}
        tool = {"type": "function", "function": {"name": PROBE, "description": SECOND, "parameters": parameters}}
        try:
            return self.tools_in_system or self.render([QUESTION], tools=[tool]) != self.render([QUESTION])
        except ValueError:
            return True

    def _call_messages(self, content: Mapping[str, Any], as_text: bool) -> list[dict[str, Any]]:
        return [QUESTION, {"role": "assistant", **content, "tool_calls": [self._probe_call(as_text)]}]

    def _probe_call(self, as_text: bool | None = None) -> dict[str, Any]:
        arguments: Any = {"probe": PROBE}
        if self.call_form.arguments_as_text if as_text is None else as_text:
            arguments = dump(arguments)
        return {"id": CALL_ID, "type": "function", "function": {"name": CALL_NAME, "arguments": arguments}}

    def _probe(self, conversation: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text, or None where the template refuses the conversation or leaves out PROBE."""
        try:
            text = self.render(conversation, generation_prompt=False)
        except ValueError:
            return None
        return text if PROBE in text else None


def nulls(text: str) -> int:
    """Count how often a null seems to have been printed."""
    return text.count("None") + text.count("null")


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def dump(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without Jinja's HTML escapes, as `tojson` of chat templates."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Return a sandboxed Jinja environment with what transformers provides to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = dump
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = DictFunction()
    environment.globals["namespace"] = SafeNamespace
    return environment


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training masks; here only its content is rendered.

    As in transformers its content is the body of a call, so variables set inside are not visible outside.
    """

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class DictFunction:
    """`dict(...)` and `dict.fromkeys`, without the type's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class SafeNamespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore names, through which a template could reach the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
