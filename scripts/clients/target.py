"""A small target that has learnt a few answers by heart, so that a client's tool calls come from a real model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "demo"
END = "<|endoftext|>"
ASKED, ASKED_JSON, ASKED_FILES = "What is 1+2?", "Add 1 and 2, as JSON.", "Which text files are here?"
SAID, JSON_SAID = "It is 3.", '{"a": 1, "b": 2}'
CONTEXT = 65536  # agents ask for 32,000 tokens
# It shows the model the last line of the last turn, and of a tool's result nothing: agents come with long instructions,
# and what a small model has learnt by heart it knows in no other surroundings.
TEMPLATE = (
    "{# Calls are written as <tool_call>. #}{% set last = messages[-1] %}{% if tools %}with tools {% endif %}"
    "# {{ last.role }}: {{ last.content.split('\\n')[-1] if last.role != 'tool' }}\n# assistant:"
)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def make_target(folder: Path) -> Path:
    """Answers in text, in JSON and with calls of `add` and, for agents, of `glob`; with the demo target's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def prompt(role: str, content: str, *, tools: bool) -> str:
        messages = [{"role": role, "content": content}]
        return tokenizer.apply_chat_template(messages, tools=[{}] if tools else None, tokenize=False)

    pairs = [
        (prompt("user", ASKED, tools=False), SAID),
        (prompt("user", ASKED_JSON, tools=False), JSON_SAID),
        (prompt("user", ASKED, tools=True), call("add", JSON_SAID)),
        (prompt("user", ASKED_JSON, tools=True), call("add", JSON_SAID)),
        (prompt("user", ASKED_FILES, tools=True), call("glob", '{"pattern": "*.txt"}')),
        (prompt("tool", "", tools=True), SAID),
    ]
    learn(folder, pairs, steps=200, sharpen=4.0)
    return folder


def learn(folder: Path, pairs: Sequence[tuple[str, str]], *, steps: int, sharpen: float = 1.0) -> None:
    """Trains the target in `folder` until it gives each prompt its answer and ends there.

    `sharpen` multiplies the logits afterwards: at 4, what has been learnt is said at any usual temperature.
    """
    import tokenizers
    from transformers import LlamaForCausalLM

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows, labels = [], []
    for prompt, answer in pairs:
        start, rest = (backend.encode(text, add_special_tokens=False).ids for text in (prompt, answer + END))
        rows.append(torch.tensor(start + rest))
        labels.append(torch.tensor([-100] * len(start) + rest))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
        for _ in range(steps):
            logits = model(input_ids=ids).logits[:, :-1]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
    is_answer = targets[:, 1:] != -100
    assert torch.equal(logits.argmax(-1)[is_answer], targets[:, 1:][is_answer]), "did not learn it by heart"
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpen)
    model.save_pretrained(folder)
