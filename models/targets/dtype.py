"""The dtype that a checkpoint states for computation."""

from __future__ import annotations

from pathlib import Path

import torch

from models.config import read_json
from models.gguf import is_gguf

DTYPES = ("float32", "bfloat16", "float16")
OF_GGUF = torch.bfloat16  # its tensors have several types, and it states none for computation


def stated_dtype(checkpoint: Path) -> torch.dtype:
    """Return `dtype`, formerly `torch_dtype`, of a folder's config.json, or float32; bfloat16 for a .gguf file.

    Raises ValueError for a dtype that is not in DTYPES.
    """
    if is_gguf(checkpoint):
        return OF_GGUF
    config = read_json(checkpoint / "config.json")
    stated = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stated not in DTYPES:
        raise ValueError(f"{checkpoint}: config.json: dtype={stated!r}: say model.dtype={' or '.join(DTYPES)}")
    return getattr(torch, stated)
