"""What is asked in a bench: held-out lines of the demo corpus, which is code, or the prompts of files."""

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
    """`num_prompts` token ids of at most `prompt_tokens` each, from the files in turn.

    Prompts of the corpus have exactly so many. A conversation that is longer is left out, because cut it would be
    another; a text is cut. Raises ValueError for a file that cannot be read or that holds too few.
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
