"""Finds and reads the tensors of a checkpoint folder: safetensors, in one file or in shards, or one pickle."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from models.formats.pickled import read_pickle
from models.weights import INDEX, SINGLE, read_file, read_tensors

PICKLES = (".bin", ".pt", ".pth")


def find_weights(folder: Path, names: tuple[str, ...]) -> Path:
    """Return the first of `names` that exists; model.safetensors also stands for shards. Raises ValueError if none."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
        if name == SINGLE and (folder / INDEX).is_file():
            return folder / INDEX
    raise ValueError(f"{folder}: no weights; looked for {', '.join(names)}")


def read_weights(file: Path, *, pickles: bool) -> dict[str, Tensor]:
    """Read `file`, as `find_weights` returned it. A pickle is read only with `pickles`, and then only its tensors.

    Raises ValueError for a pickle otherwise.
    """
    if file.suffix in PICKLES:
        if not pickles:
            raise ValueError(
                f"{file}: a pickle, which can run code when it is read; `python scripts/convert.py --allow-pickle` "
                "reads its tensors and refuses everything else"
            )
        return read_pickle(file)
    return dict(read_tensors(file.parent) if file.name in (SINGLE, INDEX) else read_file(file))
