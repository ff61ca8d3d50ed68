"""What is asked in a bench: held-out lines of the demo corpus, which is code, or the prompts of a file."""

from __future__ import annotations

from typing import Any

from infer.config import BenchConfig, ServedConfig


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
    found = Reader(settings, tokenizer, settings.max_prompt_tokens, config.num_prompts).read_prompts()
    if len(found) < config.num_prompts:
        raise ValueError(
            f"file={config.file}: holds {len(found)} prompts; num_prompts={config.num_prompts} are asked for"
        )
    return [ids[: config.prompt_tokens] for ids in found]
