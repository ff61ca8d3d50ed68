"""Writes what a GGUF file holds other than weights as the files of a Hugging Face checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.chat import DEFAULT
from models.gguf.config import config_json
from models.gguf.file import open_gguf
from models.gguf.tokenizer import build_tokenizer, chat_templates, special_tokens


def write_beside(checkpoint: Path, folder: Path, end_tokens: tuple[int, ...]) -> None:
    """Write config.json, generation_config.json and the tokenizer's files. Raises ValueError if not supported."""
    file = open_gguf(checkpoint)
    templates = chat_templates(file)
    tokenizer: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens(file)}
    tokenizer |= {"clean_up_tokenization_spaces": False}
    if list(templates) == [DEFAULT]:
        tokenizer["chat_template"] = templates[DEFAULT]
    elif templates:
        tokenizer["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    contents = {
        "config.json": config_json(file) | {"dtype": "float32"},
        "generation_config.json": {"eos_token_id": list(end_tokens)},
        "tokenizer_config.json": tokenizer,
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
