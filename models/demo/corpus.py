"""The demo target's corpus: the running Python's standard library, split into train and held-out by file.

The split is by a hash of the file's name, so it is the same on every machine. The text depends on the interpreter, so
report `corpus_hash()` and the Python version with every number measured on it.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

# Tests, other people's packages, and generated tables (code pages, help topics as one literal): no prose, no code.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip"}
SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}
HELD_OUT_SHARE = 0.05

Split = Literal["train", "held_out"]


class Document(NamedTuple):
    name: str  # path relative to the standard library
    text: str


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def stdlib_files() -> list[Path]:
    """Return the standard library's source files without tests and generated tables, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = list[Path]()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]  # site-packages may be huge
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def is_held_out(name: str) -> bool:
    """Return whether a file belongs to the held-out split; `name` is its path relative to the standard library."""
    return int.from_bytes(hashlib.sha256(f"headway:{name}".encode()).digest()[:4], "big") / 2**32 < HELD_OUT_SHARE


@lru_cache(maxsize=2)
def read_split(split: Split) -> tuple[Document, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in stdlib_files():
        name = path.relative_to(root).as_posix()
        if is_held_out(name) == (split == "held_out"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                documents.append(Document(name, text))
    return tuple(documents)


def corpus_hash() -> str:
    """Return a hash over names and texts of both splits."""
    digest = hashlib.sha256()
    for split in ("train", "held_out"):
        for document in read_split(split):
            digest.update(f"{document.name}\0{document.text}\0".encode())
    return digest.hexdigest()[:16]


def cut_prompts(tokenizer: Encoder, split: Split, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of `tokens` ids from random line starts of files drawn by length; reproducible by seed."""
    rng = random.Random(f"{split}-{seed}")
    documents: Sequence[Document] = read_split(split)
    weights = [len(document.text) for document in documents]
    prompts: list[list[int]] = []
    while len(prompts) < count:
        text = rng.choices(documents, weights)[0].text
        start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
        ids = tokenizer.encode(text[start : start + 12 * tokens])[:tokens]
        if len(ids) == tokens:
            prompts.append(ids)
    return prompts


def held_out_prompts(tokenizer: Encoder, count: int, tokens: int = 64, seed: int = 0) -> list[list[int]]:
    return cut_prompts(tokenizer, "held_out", count, tokens, seed)
