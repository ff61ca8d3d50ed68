"""The only place that reads a pickle, and only at the user's request: tensors by name, nothing else."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def read_pickle(file: Path) -> dict[str, Tensor]:
    """Read tensors by name. Raises ValueError when the file is broken, or holds anything else.

    With `weights_only` torch itself builds tensors and plain containers; a pickle that would run code is refused.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of a dozen types; torch's message would advise trusting the file
        raise ValueError(
            f"{file}: cannot be read ({type(error).__name__}): it is broken, or holds more than tensors; "
            "copy or download it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}; expected tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter):
            raise ValueError(f"{file}: {name!r} is a {type(value).__name__}; expected nothing but tensors by name")
    return {name: value.detach().contiguous() for name, value in content.items()}
