"""Where data come from: prompts cut from the demo corpus, or rows of a JSON Lines file; split into train and held-out.

Knows how a row is read and why one is refused; what is generated from a prompt is train/regenerate.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from infer.config import resolve_path
from models.demo.corpus import corpus_hash, held_out_prompts, train_prompts
from models.tokenizer import Tokenizer
from train.config import DemoDataConfig, JsonlDataConfig, TrainConfig

FORMS = ("prompt", "messages", "input_ids")


class Row(NamedTuple):
    """A prompt for the target to continue; with `loss_mask` a whole sequence that somebody generated before."""

    ids: list[int]
    loss_mask: list[bool] | None = None

    @property
    def prompt(self) -> list[int]:
        """The part before the target's first token."""
        return self.ids if self.loss_mask is None else self.ids[: self.loss_mask.index(True)]


class Prompts(NamedTuple):
    train: list[Row]
    held_out: list[Row]
    source: str  # what the data were made from, for the record
    complaints: list[str]  # rows that were left out, and why


def read_prompts(config: TrainConfig, tokenizer: Tokenizer, context: int) -> Prompts:
    data = config.data
    if isinstance(data, DemoDataConfig):
        if data.prompt_tokens + 2 >= context:
            raise ValueError(f"data.prompt_tokens={data.prompt_tokens}: leaves no room in a context of {context}")
        return Prompts(
            [Row(ids) for ids in train_prompts(tokenizer, data.num_sequences, data.prompt_tokens, config.seed)],
            [Row(ids) for ids in held_out_prompts(tokenizer, config.eval_prompts, data.prompt_tokens, config.seed)],
            f"demo corpus {corpus_hash()}",
            [],
        )
    assert isinstance(data, JsonlDataConfig)
    return read_jsonl_prompts(data, tokenizer, min(data.max_prompt_tokens, context - 3), config.eval_prompts)


def read_jsonl_prompts(data: JsonlDataConfig, tokenizer: Tokenizer, longest: int, eval_prompts: int) -> Prompts:
    rows, complaints, digest = read_jsonl("data.path", data.path, tokenizer, longest)
    source = f"{Path(data.path).name} {digest}"
    if data.held_out_path is not None:
        held_out, more, digest = read_jsonl("data.held_out_path", data.held_out_path, tokenizer, longest)
        source, complaints = f"{source}, {Path(data.held_out_path).name} {digest}", complaints + more
    else:
        # By content, so that adding rows moves none from one side to the other, and twins stay together.
        ranked = sorted(rows, key=lambda row: hashlib.sha256(repr(row.ids).encode()).digest())
        count = max(1, round(data.held_out_share * len(ranked)))
        chosen = {tuple(row.ids) for row in ranked[:count]}
        held_out = [row for row in rows if tuple(row.ids) in chosen]
        rows = [row for row in rows if tuple(row.ids) not in chosen]
    if not rows or not held_out:
        raise ValueError(f"data.path={data.path}: too few different rows to hold one out; give at least two")
    return Prompts(rows[: data.num_sequences], held_out[:eval_prompts], source, complaints)


def read_jsonl(key: str, path: str, tokenizer: Tokenizer, longest: int) -> tuple[list[Row], list[str], str]:
    """Rows, complaints and the content's hash. Raises ValueError when there is no such file or no good row."""
    file = resolve_path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{key}={path}: cannot be read ({error.strerror or error}); looked for {file}") from error
    rows, complaints = [], []
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(parse_row(line, tokenizer, longest))
        except ValueError as error:
            complaints.append(f"{path}, line {number}: {error}")
    if not rows:
        first = f"; {complaints[0]}" if complaints else ": the file is empty"
        raise ValueError(f"{key}={path}: no usable row{first}")
    return rows, complaints, hashlib.sha256(content).hexdigest()[:16]


def parse_row(line: str, tokenizer: Tokenizer, longest: int) -> Row:
    """Raises ValueError saying what is wrong with the row."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    forms = [form for form in FORMS if isinstance(row, dict) and form in row]
    if len(forms) != 1:
        raise ValueError(f"must hold exactly one of {', '.join(FORMS)}; it holds {' and '.join(forms) or 'none'}")
    if forms == ["input_ids"]:
        parsed = Row(*check_sequence(row["input_ids"], row.get("loss_mask"), tokenizer.vocab_size))
    elif forms == ["prompt"]:
        if not isinstance(row["prompt"], str):
            raise ValueError("prompt must be a text")
        parsed = Row(tokenizer.encode(row["prompt"]))
    else:
        parsed = Row(tokenizer.apply_chat_template(check_messages(row["messages"])))
    if not 1 <= len(parsed.prompt) <= longest:
        raise ValueError(f"the prompt has {len(parsed.prompt)} tokens; 1 to {longest} are possible")
    return parsed


def check_messages(messages: object) -> list[dict]:
    """The conversation up to the turn that the target is to write; a last answer in the data is dropped."""
    if not isinstance(messages, list) or not all(isinstance(item, dict) and "role" in item for item in messages):
        raise ValueError('messages must be a list of {"role": ..., "content": ...}')
    kept = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not kept:
        raise ValueError("messages hold no turn to answer")
    return kept


def check_sequence(ids: object, mask: object, vocab_size: int) -> tuple[list[int], list[bool]]:
    if not isinstance(ids, list) or not all(type(item) is int and 0 <= item < vocab_size for item in ids):
        raise ValueError(f"input_ids must be a list of token ids below {vocab_size}")
    if not isinstance(mask, list) or not all(item in (0, 1) for item in mask) or len(mask) != len(ids):
        raise ValueError("loss_mask must be a list of 0 and 1, as long as input_ids")
    if not has_served_slot(mask):
        raise ValueError("loss_mask leaves nothing to learn: two neighbouring tokens must be the target's own")
    return ids, [bool(item) for item in mask]


def has_served_slot(mask: Sequence[int]) -> bool:
    return any(a and b for a, b in pairwise(mask[1:]))
