"""GGUF files (llama.cpp's checkpoint format) as targets, read like a checkpoint folder, and as heads (head.py).

See models/README.md.

The modules import the package `gguf`. Other folders import them only for such a file, inside functions, so a machine
that has no such files needs no such package; `is_gguf` is all they ask before.
"""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".gguf"


def is_gguf(path: str | Path) -> bool:
    """Return whether a checkpoint is a file of this format, and not a folder, by its name alone."""
    return str(path).lower().endswith(SUFFIX)
