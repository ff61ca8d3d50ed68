"""The prompts of a proof: of the user's files, of the demo corpus, or of the built-in ones; and texts that repeat."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from models.tokenizer import Tokenizer
from scripts.proof.config import ProveConfig

MOST_TOKENS, REPEATED = 96, 12  # of a prompt of our own; of the piece that a repeating prompt repeats
PAIRS = 4  # repeating prompts: a quarter of all, since in other texts copies are hardly ever drafted


def read_mix(config: ProveConfig, tokenizer: Tokenizer, longest: int) -> list[tuple[int, ...]]:
    """Return `num_prompts` prompts as token ids, of at most `longest` each. Raises ValueError as `read_file` does."""
    longest = min(longest, MOST_TOKENS)
    if config.files:
        from scripts.benchmarks.config import PromptsConfig
        from scripts.benchmarks.prompts import read_file

        shared = config.model, config.head, config.engine
        reading = PromptsConfig(*shared, files=config.files, columns=config.columns, prompt_tokens=longest)
        share = -(-config.num_prompts // len(config.files))
        rows = [read_file(reading, "files", file, tokenizer, share, longest) for file in config.files]
        return [tuple(ids[:longest]) for each in rows for ids in each][: config.num_prompts]
    count = max(1, config.num_prompts - config.num_prompts // PAIRS)
    if config.model.name == "demo":
        from models.demo.corpus import held_out_prompts

        prompts = held_out_prompts(tokenizer, count, min(64, longest))
    else:
        prompts = [ids for ids, _ in zip(built_in(tokenizer, longest), range(count), strict=False)]
    repeating = [ids[-REPEATED:] * (longest // REPEATED // 2 or 1) for ids in prompts[: config.num_prompts - count]]
    return [tuple(ids) for ids in prompts + repeating]


def built_in(tokenizer: Tokenizer, longest: int) -> Iterator[list[int]]:
    from infer.console.show import prompt_ids
    from train.data.builtin_prompts import builtin_items

    for item in builtin_items(held_out=True):
        ids = prompt_ids(item.row["prompt"], tokenizer, chat=None)
        if len(ids) <= longest:
            yield ids


def digest(prompts: Sequence[Any]) -> str:
    """Return the SHA-256 of the prompts, ids or messages, as JSON without spaces."""
    return hashlib.sha256(json.dumps(prompts, separators=(",", ":")).encode()).hexdigest()
