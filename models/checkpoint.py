"""A target's checkpoint, wherever it lies: a folder in Hugging Face's layout, or one GGUF file.

Both say the same under the same names: the configuration as config.json has it, tensors as safetensors name them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import weights
from models.config import read_json
from models.gguf.config import config_json
from models.gguf.file import is_gguf, open_gguf
from models.gguf.tensors import GgufTensors

SAMPLE = 65536  # bytes of each place of a file that a fingerprint reads


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The keys of config.json. Raises ValueError naming the file for one that is broken or not supported."""
    return config_json(open_gguf(checkpoint)) if is_gguf(checkpoint) else read_json(checkpoint / "config.json")


def open_tensors(
    checkpoint: Path, dtype: torch.dtype = torch.float32, rows: weights.Rows | None = None, *, progress: bool = False
) -> Mapping[str, Tensor]:
    """Each read when it is asked for: those of a folder as they are stored, those of a GGUF file in `dtype`.

    `rows` and `progress` are for a GGUF file: see GgufTensors. Raises ValueError for a broken checkpoint.
    """
    if is_gguf(checkpoint):
        file = open_gguf(checkpoint)
        return GgufTensors(file, config_json(file), dtype, rows, progress=progress)
    assert rows is None
    return weights.LazyTensors(checkpoint)


def has_weights(checkpoint: Path) -> bool:
    """Whether all of them are there: of a hub id, only its configuration may have come."""
    return is_gguf(checkpoint) or weights.has_weights(checkpoint)


def fingerprint(checkpoint: Path) -> str:
    """Identifies a checkpoint without reading it all: its configuration, and of each file size and samples."""
    if not is_gguf(checkpoint):
        return weights.fingerprint(checkpoint)
    file = open_gguf(checkpoint)
    digest = hashlib.sha256(f"{len(file)}".encode())
    for sample in file.samples(SAMPLE):
        digest.update(sample)
    return digest.hexdigest()[:32]
