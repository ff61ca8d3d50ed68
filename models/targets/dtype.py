"""The dtype that a checkpoint says it is computed in."""

from __future__ import annotations

from pathlib import Path

import torch

from models.config import read_json
from models.gguf.file import is_gguf

DTYPES = ("float32", "bfloat16", "float16")
OF_GGUF = torch.bfloat16  # whose tensors are of several types, and name none


def stated_dtype(checkpoint: Path) -> torch.dtype:
    """`dtype`, formerly `torch_dtype`, of a folder's config.json; float32 where it is not stated, bfloat16 of a .gguf.

    Raises ValueError for a dtype that targets are not computed in.
    """
    if is_gguf(checkpoint):
        return OF_GGUF
    written = read_json(checkpoint / "config.json")
    stated = written.get("dtype") or written.get("torch_dtype") or "float32"
    if stated not in DTYPES:
        raise ValueError(f"{checkpoint}: config.json: dtype={stated!r}: say model.dtype={' or '.join(DTYPES)}")
    return getattr(torch, stated)
