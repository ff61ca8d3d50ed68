"""A target's checkpoint in either form: a folder in Hugging Face's layout, or one GGUF file.

Both are read under the same names: the configuration under config.json's, tensors under those of the safetensors.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from models import weights
from models.config import read_config_json
from models.gguf import is_gguf
from models.quantized import read_scheme
from models.stacked_experts import open_weights

DTYPES = ("float32", "bfloat16", "float16")
OF_GGUF = torch.bfloat16  # its tensors have several types, and it states none for computation
SAMPLE = 65536  # bytes that a fingerprint reads at each sampled place of a file


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Return the keys of config.json. Raises ValueError naming the file for one that is broken or not supported."""
    if not is_gguf(checkpoint):
        return read_config_json(checkpoint / "config.json")
    from models.gguf.config import config_json
    from models.gguf.file import open_gguf

    return config_json(open_gguf(checkpoint))


def open_tensors(
    checkpoint: Path, dtype: torch.dtype = torch.float32, rows: weights.Rows | None = None, *, progress: bool = False
) -> weights.NamedTensors:
    """Return the tensors, each read on access: those of a folder as they are stored, those of a GGUF file in `dtype`.

    `rows` selects rows of each tensor; `progress` shows a bar for a GGUF file. Raises ValueError for a broken one.
    """
    if is_gguf(checkpoint):
        from models.gguf.config import config_json
        from models.gguf.file import open_gguf
        from models.gguf.tensors import GgufTensors

        file = open_gguf(checkpoint)
        return GgufTensors(file, config_json(file), dtype, rows, progress=progress)
    return open_weights(checkpoint, rows)


def has_weights(checkpoint: Path) -> bool:
    """Return whether all weights are present: for a hub id, maybe only the configuration was fetched."""
    return is_gguf(checkpoint) or weights.has_weights(checkpoint)


def fingerprint(checkpoint: Path) -> str:
    """Hash a checkpoint without reading it all: its configuration, and size and samples of each file."""
    if not is_gguf(checkpoint):
        return weights.fingerprint(checkpoint)
    from models.gguf.file import open_gguf

    file = open_gguf(checkpoint)
    digest = hashlib.sha256(f"{len(file)}".encode())
    for sample in file.samples(SAMPLE):
        digest.update(sample)
    return digest.hexdigest()[:32]


def ggml_formats(checkpoint: Path) -> dict[str, str]:
    """Return the formats of matrices that are stored in blocks, each with the first tensor in it; none in a folder."""
    if not is_gguf(checkpoint):
        return {}
    from models.gguf.file import open_gguf

    return open_gguf(checkpoint).ggml_formats()


def stored_formats(checkpoint: Path) -> list[str]:
    """Return the names of the formats of matrices that are stored in blocks or groups; none for a dense checkpoint."""
    if is_gguf(checkpoint):
        return sorted(ggml_formats(checkpoint))
    scheme = read_scheme(read_config(checkpoint))
    return [] if scheme is None else [scheme.name]


def stated_dtype(checkpoint: Path) -> torch.dtype:
    """Return `dtype`, formerly `torch_dtype`, of a folder's config.json, or float32; bfloat16 for a .gguf file.

    Raises ValueError for a dtype that is not in DTYPES.
    """
    if is_gguf(checkpoint):
        return OF_GGUF
    config = read_config_json(checkpoint / "config.json")
    stated = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stated not in DTYPES:
        raise ValueError(f"{checkpoint}: config.json: dtype={stated!r}: say model.dtype={' or '.join(DTYPES)}")
    return getattr(torch, stated)
