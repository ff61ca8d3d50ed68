"""Finds and reads the tensors of a checkpoint folder: safetensors, in one file or in shards, or one pickle."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from models.weights import INDEX, SINGLE, LazyTensors, shard_files

PICKLES = (".bin", ".pt", ".pth")


def read_weights(folder: Path, names: tuple[str, ...], *, pickles: bool) -> dict[str, Tensor]:
    """Read the first of the files `names` that exists; model.safetensors also stands for shards.

    A pickle is read only with `pickles`, and then only its tensors. Raises ValueError for a pickle otherwise, and if
    there is no file.
    """
    for file in (folder / name for name in names):
        if file.is_file() and file.suffix in PICKLES:
            if not pickles:
                raise ValueError(
                    f"{file}: a pickle, which can run code when it is read; `python scripts/convert.py --allow-pickle` "
                    "reads its tensors and refuses everything else"
                )
            return read_pickle(file)
        if file.is_file():
            return dict(LazyTensors([file]))
        if file.name == SINGLE and (folder / INDEX).is_file():
            return dict(LazyTensors(shard_files(folder)))
    raise ValueError(f"{folder}: no weights; looked for {', '.join(names)}")


def read_pickle(file: Path) -> dict[str, Tensor]:
    """Read tensors by name: the only place that reads a pickle, and only at the user's request.

    With `weights_only` torch itself builds tensors and plain containers; a pickle that would run code is refused.
    Raises ValueError when the file is broken, or holds anything else.
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
