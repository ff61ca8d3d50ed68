"""Prompts of the benchmarks: held-out lines of the demo corpus, which is code, or prompts read from files."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

from infer.config import BenchConfig, ServedConfig


class Task(NamedTuple):
    prompt: list[int]
    tokens: int  # max_tokens of the response


def read_tasks(config: BenchConfig, tokenizer: Any) -> list[Task]:
    """Return the prompts of `read_prompts`, each with an output length drawn uniformly by `seed`.

    Lengths vary because requests of a server do not all end together.
    """
    lengths = random.Random(config.seed)
    shortest = config.max_tokens if config.min_tokens is None else config.min_tokens
    prompts = read_prompts(config, tokenizer)
    return [Task(prompt, lengths.randint(shortest, config.max_tokens)) for prompt in prompts]


def read_prompts(config: BenchConfig | ServedConfig, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of `num_prompts` prompts of at most `prompt_tokens` each, taken from the files in turn.

    Prompts of the demo corpus have exactly `prompt_tokens`. A longer conversation is skipped, because cutting it would
    change its meaning; a longer text is cut. Raises ValueError for a file that cannot be read or holds too few prompts.
    """
    from models.demo.corpus import held_out_prompts
    from train.config import FilesDataConfig
    from train.data.prompts import Reader

    if not config.files:
        return held_out_prompts(tokenizer, config.num_prompts, config.prompt_tokens)
    share = -(-config.num_prompts // len(config.files))
    by_file = []
    for file in config.files:
        settings = FilesDataConfig(name="files", path=file, columns=config.columns, prompt_tokens=config.prompt_tokens)
        longest = config.prompt_tokens if tokenizer.chat.texts else settings.max_prompt_tokens
        reader = Reader(settings, tokenizer, longest, share)
        prompts = reader.read_prompts()
        for line in reader.reading.named():
            print(line, file=sys.stderr)
        if len(prompts) < share:
            raise ValueError(
                f"files=[{file}]: holds {len(prompts)} prompts of up to {config.prompt_tokens} tokens; "
                f"num_prompts={config.num_prompts} needs {share} of each file"
            )
        by_file.append([ids[: config.prompt_tokens] for ids in prompts])
    return [ids for row in zip(*by_file, strict=True) for ids in row][: config.num_prompts]
