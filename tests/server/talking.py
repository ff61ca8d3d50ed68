"""A small target that has learnt a few answers by heart, so that tool calls and reasoning come from a real model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch

from models.chat_template import chat_environment

SPECIAL = ("[TOOL_CALLS]", "<|python_tag|>")
END = "<|endoftext|>"
STEPS = 160
# What a template says of tools, and so which style the server takes from it.
MARKS = {"hermes": "<tool_call>", "mistral": "[AVAILABLE_TOOLS]", "llama3": "<|python_tag|>", "think": "<think>"}
ASKED = "What is 1+2?"
CALL = {
    "hermes": 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 3}}]',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}};{"name": "add", "parameters": {"a": 3}}',
    "think": "<think>\n1 and 2 is 3\n</think>\n\nIt is 3.",
}


def template(style: str) -> str:
    mark = MARKS[style].replace("<|", "<").replace("|>", ">").strip("<>[]")  # short, and no token of its own
    return (
        f"{{# {MARKS[style]} #}}{{% if tools %}}{mark}{{{{ tools | length }}}} {{% endif %}}"
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %} {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}\n"
        "{% endfor %}" + ("think " if style == "think" else "") + "# assistant:"
    )


def prompt(style: str) -> str:
    """As the template renders one user message, with one tool."""
    rendered = chat_environment().from_string(template(style))
    return rendered.render(messages=[{"role": "user", "content": ASKED}], tools=None if style == "think" else [{}])


def make_talking_target(make_target_folder: Callable[..., Path], folder: Path) -> Path:
    """Trains it; `style_folder` gives it a template."""
    from transformers import LlamaForCausalLM

    source = make_target_folder(seed=21, num_hidden_layers=2, vocab_size=384 + len(SPECIAL), initializer_range=0.02)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    rows, labels = [], []
    for style, answer in CALL.items():
        start, rest = (backend.encode(text, add_special_tokens=False).ids for text in (prompt(style), answer + END))
        rows.append(torch.tensor(start + rest))
        labels.append(torch.tensor([-100] * len(start) + rest))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    wanted = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
        for _ in range(STEPS):
            logits = model(input_ids=ids).logits[:, :-1]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
    asked = wanted[:, 1:] != -100
    assert torch.equal(logits.argmax(-1)[asked], wanted[:, 1:][asked]), "did not learn it by heart"
    model.save_pretrained(folder)
    return folder


def style_folder(base: Path, style: str, folder: Path) -> Path:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template(style))
    return folder
