"""End tokens: the ids that end a target's text. One set for serving, training and every tool.

A checkpoint names them in up to three places, and any of them may hold an id that the others lack: `eos_token_id` of
config.json, `eos_token_id` of generation_config.json (chat models name their end of turn here), and the tokenizer's
`eos_token`. A GGUF file has keys for the ends of a text, of a turn and of a message, and control tokens
whose texts say that they are one. models/tokenizer.py adds what the chat template writes after an assistant's content.
Generation ends at each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import read_config_json, token_ids
from models.gguf import is_gguf

if TYPE_CHECKING:
    from models.gguf.file import GgufFile

GGUF_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Tokens of published models that end a turn, a message or a text, by their text. GGUF files often name one end token of
# several, so their readers go by the texts, as llama.cpp does.
END_TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
    "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>",
)  # fmt: skip
PART, WHOLE = "<|end|>", "<|return|>"  # beside the latter, the former ends a part of a turn only
CONTROL = 3  # kind of a token in a GGUF file
log = logging.getLogger("headway.targets")


def read_end_tokens(folder: Path, eos_id: int | None = None) -> tuple[int, ...]:
    """Return the end tokens of a GGUF file or a folder, whose config.json and generation_config.json may be absent.

    `eos_id`: the id of the tokenizer's `eos_token`, from a caller that has the tokenizer. Ids outside the vocabulary
    are left out with a warning. Raises ValueError naming file and key for a value that is no token id.
    """
    sources: dict[int, str] = {}
    vocab_size: object = None
    if is_gguf(folder):
        from models.gguf.file import open_gguf

        file = open_gguf(folder)
        for key in GGUF_KEYS:
            ids = token_ids(f"{folder}: {key}", file.keys.get(key))
            sources |= {token: f"{folder}: {key}" for token in ids if token not in sources}
        tokens: list[str] = file.keys.get("tokenizer.ggml.tokens", [])
        for text in gguf_ends(file):
            sources.setdefault(tokens.index(text), f"{folder}: tokenizer.ggml.tokens")
        vocab_size = len(tokens) or None
    for name in ("generation_config.json", "config.json"):
        content = read_config_json(folder / name) if (folder / name).is_file() else {}
        ids = token_ids(f"{folder / name}: eos_token_id", content.get("eos_token_id"))
        sources |= {token: f"{folder / name}: eos_token_id" for token in ids if token not in sources}
        vocab_size = content.get("vocab_size", vocab_size)
    if eos_id is not None:
        sources.setdefault(eos_id, f"{folder}: the tokenizer's eos_token")
    if not isinstance(vocab_size, int):
        return tuple(sources)
    for token, source in sources.items():
        if not 0 <= token < vocab_size:
            log.warning("%s: %d is outside the vocabulary of %d and is ignored", source, token, vocab_size)
    return within(sources, vocab_size)


def ends_among(texts: Container[str]) -> list[str]:
    """Return those of the texts of control tokens that end a turn or a text."""
    return [text for text in END_TEXTS if text in texts and not (text == PART and WHOLE in texts)]


def gguf_ends(file: GgufFile) -> list[str]:
    """Return the texts of a file's tokens that end a turn or a text, if they are control tokens.

    Some files mark them as ordinary text, which the chat template contradicts by writing them.
    """
    tokens: list[str] = file.keys.get("tokenizer.ggml.tokens", [])
    types: list[int] = file.keys.get("tokenizer.ggml.token_type", [])
    written = "".join(text for key, text in file.keys.items() if key.startswith("tokenizer.chat_template"))
    control = {token for token, kind in zip(tokens, types, strict=False) if kind == CONTROL}
    return ends_among({token for token in END_TEXTS if token in control or (token in written and token in tokens)})


def within(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids that are in the vocabulary, each once, in their order."""
    return tuple(token for token in dict.fromkeys(ids) if 0 <= token < vocab_size)
