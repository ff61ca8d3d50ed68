"""The prompts of a measurement: held-out lines of the demo corpus, which is code, or the prompts of files."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

from scripts.benchmarks.config import CompareConfig, PromptsConfig


class Task(NamedTuple):
    prompt: list[int]
    tokens: int  # max_tokens of the response


def read_tasks(config: CompareConfig) -> list[Task]:
    """Return the prompts of `read_prompts`, each with an output length drawn uniformly by `seed`.

    Lengths vary because requests of a server do not all end together.
    """
    lengths = random.Random(config.seed)
    shortest = config.max_tokens if config.min_tokens is None else config.min_tokens
    return [Task(prompt, lengths.randint(shortest, config.max_tokens)) for prompt in read_prompts(config)]


def read_prompts(config: PromptsConfig) -> list[list[int]]:
    """Return the token ids of `num_prompts` prompts of at most `prompt_tokens` each, taken from the files in turn.

    Prompts of the demo corpus have exactly `prompt_tokens`. A longer conversation is skipped, because cutting it would
    change its meaning; a longer text is cut. Raises ValueError for a file that cannot be read or holds too few prompts,
    and without files unless the target is the demo target.
    """
    from models.demo.corpus import held_out_prompts
    from models.targets import resolve_checkpoint
    from models.tokenizer import Tokenizer

    if config.model.name != "demo" and not config.files:
        raise ValueError(
            f"model={config.model.name}: prompts are cut from the demo target's corpus; "
            "use model=demo, or give files=[...]"
        )
    tokenizer = Tokenizer.load(resolve_checkpoint(config.model.path_or_hub_id, config.model.revision))
    if not config.files:
        return held_out_prompts(tokenizer, config.num_prompts, config.prompt_tokens)
    share = -(-config.num_prompts // len(config.files))
    longest = config.prompt_tokens if tokenizer.chat.texts else None
    by_file = [read_file(config, "files", file, tokenizer, share, longest) for file in config.files]
    for file, prompts in zip(config.files, by_file, strict=True):
        if len(prompts) < share:
            raise ValueError(
                f"files=[{file}]: holds {len(prompts)} prompts of up to {config.prompt_tokens} tokens; "
                f"num_prompts={config.num_prompts} needs {share} of each file"
            )
    rows = zip(*by_file, strict=True)
    return [ids[: config.prompt_tokens] for row in rows for ids in row][: config.num_prompts]


def read_file(
    config: PromptsConfig,
    key: str,
    file: Any,
    tokenizer: Any,
    count: int,
    longest: int | None,
    engine: Any = None,
    **options: Any,
) -> list[list[int]]:
    """Return the prompts of up to `count` rows of a file, of at most `longest` tokens, and print what was skipped.

    They are the rows' first prompts; with an engine, whose responses they then follow, those of later questions too.
    `file` is what training's `data.path` takes, `options` are further keys of its `data.`. Raises ValueError, which
    names `key`, for a file that cannot be read or holds no such prompt.
    """
    from train.config import FilesDataConfig
    from train.data.prompts import Reader

    keys = {"path": file, "columns": config.columns, "prompt_tokens": config.prompt_tokens}
    settings = FilesDataConfig(name="files", **keys, **options)
    reader = Reader(settings, tokenizer, longest or settings.max_prompt_tokens, count)
    try:
        prompts = reader.read_prompts()
    except ValueError as error:
        raise ValueError(str(error).replace("data.path=", f"{key}=", 1)) from error
    for line in reader.reading.named():
        print(line, file=sys.stderr)
    return prompts if engine is None else every_prompt(engine, reader, config.max_tokens)


def every_prompt(engine: Any, reader: Any, max_tokens: int) -> list[list[int]]:
    """Return the prompts of all rows that were read; that of a later question follows the engine's greedy responses."""
    from infer.request import SamplingParams
    from train.data.dialogue import Dialogue

    rows = [Dialogue(row, reader.tokenizer, longest_prompt=reader.longest) for row in reader.held_out.values()]
    asked: list[list[list[int]]] = [[] for _ in rows]
    left = list(range(len(rows)))
    while left:
        prompts = {place: prompt for place in left if (prompt := rows[place].next_prompt()) is not None}
        for place, prompt in prompts.items():
            asked[place].append(prompt)
        left = [place for place in prompts if rows[place].unfinished]
        completions = engine.generate([prompts[place] for place in left], SamplingParams(max_tokens=max_tokens))
        for place, completion in zip(left, completions, strict=True):
            rows[place].take(completion.token_ids)
    for row in rows:
        if row.cut is not None:
            print(f"shortened: {row.example.place}: {row.cut}", file=sys.stderr)
    return [prompt for prompts in asked for prompt in prompts]
