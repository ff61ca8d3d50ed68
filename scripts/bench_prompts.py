"""What is asked in a bench: held-out lines of the demo corpus, which is code, or the prompts of a file."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

from infer.config import BenchConfig, ServedConfig


class Task(NamedTuple):
    prompt: list[int]
    tokens: int  # that are to answer it


def read_tasks(config: BenchConfig, tokenizer: Any) -> list[Task]:
    """See `read_prompts`. Lengths are drawn evenly, by `seed`: servers never have requests that all end together."""
    lengths = random.Random(config.seed)
    shortest = config.max_tokens if config.min_tokens is None else config.min_tokens
    prompts = read_prompts(config, tokenizer)
    return [Task(prompt, lengths.randint(shortest, config.max_tokens)) for prompt in prompts]


def read_prompts(config: BenchConfig | ServedConfig, tokenizer: Any) -> list[list[int]]:
    """`num_prompts` token ids, each `prompt_tokens` long; those of a file may be shorter, and are cut if longer.

    Raises ValueError for a file that cannot be read or that holds too few.
    """
    from models.demo.corpus import held_out_prompts
    from train.config import FilesDataConfig
    from train.prompts import Reader

    if config.file is None:
        return held_out_prompts(tokenizer, config.num_prompts, config.prompt_tokens)
    settings = FilesDataConfig(
        name="files", path=config.file, columns=config.columns, prompt_tokens=config.prompt_tokens
    )
    reader = Reader(settings, tokenizer, settings.max_prompt_tokens, config.num_prompts)
    found = reader.read_prompts()
    for line in reader.reading.named():
        print(line, file=sys.stderr)
    if len(found) < config.num_prompts:
        raise ValueError(
            f"file={config.file}: holds {len(found)} prompts; num_prompts={config.num_prompts} are asked for"
        )
    return [ids[: config.prompt_tokens] for ids in found]
