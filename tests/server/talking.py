"""A small target trained to memorise a few responses, so that tool calls and reasoning come from a real model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import tokenizers

from models.chat_template import chat_environment
from tests.clients.target import learn

SPECIAL = (
    "[TOOL_CALLS]", "<|python_tag|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>",
)  # fmt: skip
# The text of a chat template from which the server recognises the style of tool calls or reasoning.
MARKS = {
    "hermes": "<tool_call>",
    "glm45": "<tool_call> <arg_key>",
    "qwen3_coder": "<tool_call> <function=",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "mistral": "[AVAILABLE_TOOLS]",
    "llama3": "<|python_tag|>",
    "harmony": "<|channel|>",
    "think": "<think>",
}
ASKED = "What is 1+2?"
CALL = {
    "hermes": 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 3}}]',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}};{"name": "add", "parameters": {"a": 3}}',
    "harmony": "<|channel|>analysis<|message|>1 and 2 is 3<|end|><|start|>assistant<|channel|>commentary<|message|>I "
    'add.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}',
    "think": "<think>\n1 and 2 is 3\n</think>\n\nIt is 3.",
}


def template(style: str) -> str:
    mark = MARKS[style].replace("<|", "<").replace("|>", ">").strip("<>[]")  # short, and not a special token itself
    return (
        f"{{# {MARKS[style]} #}}{{% if tools %}}{mark}{{{{ tools | length }}}} {{% endif %}}"
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %} {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}\n"
        "{% endfor %}" + ("think " if style == "think" else "") + "# assistant:"
    )


def prompt(style: str) -> str:
    """Return the prompt that the template renders for one user message and, except for `think`, one tool."""
    rendered = chat_environment().from_string(template(style))
    return rendered.render(messages=[{"role": "user", "content": ASKED}], tools=None if style == "think" else [{}])


def make_talking_target(make_target_folder: Callable[..., Path], folder: Path) -> Path:
    """Train the target on `CALL`; `style_folder` adds a chat template."""
    source = make_target_folder(seed=21, num_hidden_layers=2, vocab_size=384 + len(SPECIAL), initializer_range=0.02)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    learn(folder, [(prompt(style), response) for style, response in CALL.items()], steps=160)
    return folder


def style_folder(base: Path, style: str, folder: Path) -> Path:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template(style))
    return folder
