"""Chat rendering: the one place that turns messages, tools and documents into a prompt's text.

Server, training, regeneration, evaluation and generate.py all render here, so that training and serving use the same
text. It is what transformers' `apply_chat_template` returns for the same conversation. `normalize_message` converts the
forms of input messages (OpenAI's requests, rows of data) to one; the template decides the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.chat_template import Template, dump, text_part
from models.chat_turns import content_text, fit_turns
from models.json_text import read

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
REASONING = ("reasoning_content", "thinking", "reasoning")  # fields that may hold a message's reasoning


class Chat:
    """The chat templates of one model, by name. Safe to share between threads."""

    def __init__(
        self, templates: Mapping[str, str], *, special_tokens: Mapping[str, str] | None = None, source: str = "chat"
    ) -> None:
        self._templates = {name: Template(text, dict(special_tokens or {}), source) for name, text in templates.items()}
        self._source = source

    @property
    def texts(self) -> dict[str, str]:
        """The templates by name; empty for a model without one."""
        return {name: template.text for name, template in self._templates.items()}

    def text_for(self, *, tools: bool) -> str | None:
        """Return the template that renders conversations with or without tools; None where there is none."""
        name = self._template_name(tools)
        return None if name is None else self._templates[name].text

    @property
    def shows_tools(self) -> bool:
        """Whether the template for conversations with tools shows these to the model."""
        name = self._template_name(tools=True)
        return name is not None and self._templates[name].shows_tools

    @property
    def call_text(self) -> str:
        """What that template renders for a call of CALL_NAME; empty if it shows none."""
        name = self._template_name(tools=True)
        return "" if name is None else self._templates[name].call_text

    @property
    def turn_end(self) -> str:
        """What the template for conversations without tools writes after an assistant's content."""
        return self._templates[DEFAULT].turn_end if DEFAULT in self._templates else ""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """Return the prompt's text. The template writes special tokens itself, so tokenize it without adding any.

        `tools` in OpenAI's form; `options`: further variables of this model's template. `generation_prompt`: end with
        the header of the assistant's next turn; without it the text is history. Raises ValueError if there is no
        template, or it refuses a message.
        """
        name = self._template_name(bool(tools))
        if name is None:
            raise ValueError(self._missing_template())
        template = self._templates[name]
        turns = fit_turns([normalize_message(message) for message in messages], template)
        shaped = [for_template(turn, template) for turn in turns]
        if tools and template.tools_in_system:
            shaped = with_tools(shaped, tools)
        return template.render(
            shaped,
            tools=[normalize_tool(tool) for tool in tools] if tools else None,
            documents=list(documents) if documents else None,
            generation_prompt=generation_prompt,
            options=options,
        )

    def _template_name(self, tools: bool) -> str | None:
        if tools and TOOL_USE in self._templates:
            return TOOL_USE
        return DEFAULT if DEFAULT in self._templates else None

    def _missing_template(self) -> str:
        if not self._templates:
            return f"{self._source}: this model has no chat template; use plain completions (/v1/completions)"
        return (
            f"{self._source}: of its chat templates ({', '.join(sorted(self._templates))}) none is named {DEFAULT!r}; "
            f"write the one to use into {TEMPLATE_FILE}"
        )


def find_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; files win over tokenizer_config.json (`settings`). Raises ValueError."""
    files = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files[DEFAULT] = folder / TEMPLATE_FILE
    if files:
        try:
            return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{folder}: its chat templates cannot be read ({error})") from error
    template = settings.get("chat_template")
    if template is None:
        return {}
    entries = template if isinstance(template, list) else [{"name": DEFAULT, "template": template}]
    templates: dict[str, str] = {}
    for entry in entries:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(f'{folder}: chat_template must be a text or a list of {{"name": ..., "template": ...}}')
        templates[name] = text
    return templates


def normalize_message(message: Message) -> dict[str, Any]:
    """Return a message in the one normal form; idempotent.

    Null fields and empty lists are treated as absent, and so is an empty content beside calls. Content is a string or a
    list of several text parts. Calls are `{"id", "type", "function": {"name", "arguments"}}`, the arguments an object
    unless they are text that is no JSON object. Reasoning has the names that templates read. Raises ValueError saying
    what is wrong.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list):
        content = normalize_content(plain.pop("content"))
        if content is not None:
            plain["content"] = content
    if "tool_calls" in plain:
        calls = normalize_calls(plain.pop("tool_calls"))
        if calls:
            plain["tool_calls"] = calls
            if plain.get("content") == "":  # clients write either beside calls
                del plain["content"]
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def normalize_content(parts: Sequence[Any]) -> str | list[dict[str, str]] | None:
    """Normalize a list of text parts: several remain parts, one becomes a string, none None. Raises ValueError."""
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError("content has parts that are no text")
        texts.append(text)
    if len(texts) < 2:
        return texts[0] if texts else None
    return [text_part(text) for text in texts]


def normalize_calls(calls: Any) -> list[dict[str, Any]]:
    """Normalize a list of calls, a single call, or JSON text of either. Raises ValueError."""
    if isinstance(calls, str):
        try:
            calls = read(calls) if calls.strip() else []
        except ValueError:
            raise ValueError("tool_calls is a text and no JSON") from None
    if isinstance(calls, Mapping):
        calls = [calls]
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise ValueError("tool_calls must be a list of calls")
    return [normalize_call(call) for call in calls]


def normalize_call(call: Any) -> dict[str, Any]:
    """Normalize a call in OpenAI's form, or the bare {"name", "arguments"}. Raises ValueError."""
    function = call.get("function") if isinstance(call, Mapping) else None
    function = call if function is None else function
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError('tool_calls must be a list of {"function": {"name": ..., "arguments": ...}}')
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    arguments = normalize_arguments(function.get("arguments"))
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def normalize_arguments(arguments: Any) -> Any:
    """Return the arguments as an object, also from its JSON text; any other text stays as it is."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            value = read(arguments)
        except ValueError:
            return arguments
        return value if isinstance(value, dict) else arguments
    return dict(arguments) if isinstance(arguments, Mapping) else arguments


def normalize_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Remove null fields of the tool and of its function; the parameters' schema stays as it is."""
    plain = {name: value for name, value in tool.items() if value is not None}
    if isinstance(plain.get("function"), Mapping):
        plain["function"] = {name: value for name, value in plain["function"].items() if value is not None}
    return plain


def for_template(message: Mapping[str, Any], template: Template) -> dict[str, Any]:
    """Return a normalized message in the form that this template reads."""
    shaped = dict(message)
    if shaped.get("role") == "developer" and not template.knows_developer:
        shaped["role"] = "system"
    calls, content = shaped.get("tool_calls"), shaped.get("content")
    if content is None:
        shaped.pop("content", None)
        shaped |= template.call_form.without_content if calls else {"content": ""}
    else:
        form = template.content_form(str(shaped.get("role")))
        if isinstance(content, list) and not form.parts:
            shaped["content"] = content = content_text(message)
        if isinstance(content, str) and not form.strings:
            shaped["content"] = [text_part(content)]
    if calls and template.call_form.arguments_as_text:
        shaped["tool_calls"] = [{**call, "function": with_text(call["function"])} for call in calls]
    return shaped


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the tools' functions as JSON text in the system message, added if there is none."""
    text = dump([normalize_tool(tool).get("function", tool) for tool in tools])
    has_system = bool(messages) and messages[0].get("role") == "system"
    system = messages[0] if has_system else {"role": "system", "content": ""}
    return [{**system, "tools": text}, *messages[has_system:]]


def with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else dump(arguments)}
