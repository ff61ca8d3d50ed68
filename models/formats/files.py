"""Finds and reads the tensors of a checkpoint folder: safetensors, or of pickles, in one file or in shards."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from models.weights import LazyTensors, indexed_files

PICKLES = (".bin", ".pt", ".pth")
PLAIN = (Tensor, torch.nn.Parameter)
log = logging.getLogger("headway.heads")


def read_weights(folder: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Read the first of the files `names` that exists, or its shards by their index.

    Of a pickle only tensors are read, with a warning. Raises ValueError if there is no file.
    """
    for file in (folder / name for name in names):
        index = file.with_name(f"{file.name}.index.json")
        if not (file.is_file() or index.is_file()):
            continue
        files = [file] if file.is_file() else indexed_files(index)
        if file.suffix not in PICKLES:
            return dict(LazyTensors(files))
        log.warning("%s: a pickle, of which tensors are read and nothing is run; safetensors need no such care", file)
        return {name: value for shard in files for name, value in read_pickle(shard).items()}
    raise ValueError(f"{folder}: no weights; looked for {', '.join(names)}")


def read_pickle(file: Path) -> dict[str, Tensor]:
    """Read tensors by name: the only place that reads a pickle.

    With `weights_only` torch itself builds tensors and plain containers; a pickle that would run code is refused.
    Raises ValueError when the file is broken, or holds anything else.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of a dozen types; torch's message would advise trusting the file
        raise ValueError(
            f"{file}: cannot be read ({type(error).__name__}): it is broken, or holds more than tensors, which is not "
            "run; copy or download it again, or ask its authors for safetensors"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}; expected tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or type(value) not in PLAIN:
            raise ValueError(f"{file}: {name!r} is a {type(value).__name__}; expected nothing but tensors by name")
        if reason := why_not_plain(value):
            raise ValueError(f"{file}: {name!r} {reason}; expected plain tensors")
    return {name: value.detach().contiguous() for name, value in content.items()}


def why_not_plain(value: Tensor) -> str | None:
    """Return why a tensor of a pickle cannot be taken as it is: a small file may describe one of any size."""
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        return "is sparse, quantized or without data"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"{list(value.shape)} has more elements than the file holds for it"
    return None
