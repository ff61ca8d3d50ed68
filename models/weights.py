"""Reading and writing safetensors, strict about names and shapes and independent of the architecture.

A parameter may be the concatenation of several checkpoint tensors (merged QKV); `layout` says which.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models.config import read_json

log = logging.getLogger(__name__)

# (tensor name, number of rows) -> first and last + 1 of the wanted rows, None for all
Rows = Callable[[str, int], tuple[int, int] | None]
CHUNK_ROWS = 1024
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def shard_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder. Raises ValueError saying what was looked for."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX}: weight_map is missing; download the checkpoint again")
        names = sorted(set(map(str, weight_map.values())))
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise ValueError(f"{folder}: {INDEX} names {name!r}, which is not there; download the checkpoint again")
        return [folder / name for name in names]
    raise ValueError(f"{folder}: no weights; looked for {SINGLE} and {INDEX} (pickled .bin files are never read)")


def has_weights(folder: Path) -> bool:
    """Return whether a folder has all its safetensors files: for a hub id, maybe only the config was fetched."""
    try:
        return bool(shard_files(folder))
    except ValueError:
        return False


def read_tensors(folder: Path, rows: Rows | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a checkpoint folder, or only the rows that `rows` selects; no others are read.

    Raises ValueError for a broken file and for a name that two shards contain.
    """
    files_by_name: dict[str, Path] = {}
    files = shard_files(folder)
    sizes = [file.stat().st_size >> 20 for file in files]
    for number, file in enumerate(files):
        progress = number + 1, len(files), sum(sizes[:number]), sum(sizes)
        log.info("reading weights: file %d of %d, %d of %d MiB done (%s)", *progress, folder)
        for name, tensor in read_file(file, rows=rows):
            if name in files_by_name:
                raise ValueError(f"{folder}: {name} is doubled, in {files_by_name[name].name} and in {file.name}")
            files_by_name[name] = file
            yield name, tensor


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint folder, each read on access. Raises ValueError as `read_tensors` does."""

    def __init__(self, folder: Path) -> None:
        self._file: dict[str, Path] = {}
        for file in shard_files(folder):
            for name in _names(file):
                if name in self._file:
                    raise ValueError(f"{folder}: {name} is doubled, in {self._file[name].name} and in {file.name}")
                self._file[name] = file

    def __getitem__(self, name: str) -> Tensor:
        return next(tensor for _, tensor in read_file(self._file[name], only=name))

    def __contains__(self, name: object) -> bool:  # Mapping's default would read the tensor
        return name in self._file

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def file(self, name: str) -> Path:
        return self._file[name]

    def __len__(self) -> int:
        return len(self._file)


class Selected(Mapping[str, Tensor]):
    """The tensors of another mapping that have these names; each is still read on access only."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Set[str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names and name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if name in self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def equal_values(folder: Path, first_name: str, second_name: str) -> bool:
    """Return whether two tensors of a checkpoint folder hold the same numbers, whatever their dtypes.

    Reads a few rows at a time. Raises ValueError as `read_tensors` does.
    """
    tensors = LazyTensors(folder)
    files = [tensors.file(name) for name in (first_name, second_name)]
    try:
        with safe_open(str(files[0]), framework="pt") as first, safe_open(str(files[1]), framework="pt") as second:
            left, right = first.get_slice(first_name), second.get_slice(second_name)
            if left.get_shape() != right.get_shape():
                return False
            for row in range(0, next(iter(left.get_shape()), 0), CHUNK_ROWS):
                a, b = (piece[row : row + CHUNK_ROWS] for piece in (left, right))
                if not torch.equal(a, b.to(a.dtype)) or not torch.equal(a.to(b.dtype), b):
                    return False
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder}: {first_name} or {second_name} cannot be read ({error}); copy or download it again"
        ) from error
    return True


def _names(file: Path) -> list[str]:
    try:
        with safe_open(str(file), framework="pt") as shard:
            return list(shard.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); copy or download it again") from error


def read_file(file: Path, *, only: str | None = None, rows: Rows | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file, or the one named. Raises ValueError for a truncated or invalid file."""
    try:
        with safe_open(str(file), framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                if only in (None, name):
                    yield name, _read(shard, name, rows)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); copy or download it again") from error


def _read(shard: Any, name: str, rows: Rows | None) -> Tensor:
    if rows is None:
        return shard.get_tensor(name)
    piece = shard.get_slice(name)
    row_range = rows(name, next(iter(piece.get_shape()), 0))
    return shard.get_tensor(name) if row_range is None else piece[row_range[0] : row_range[1]]


def allocate(module: nn.Module, device: str | torch.device) -> None:
    """Give the parameters and buffers of a module on the meta device uninitialised memory.

    `Module.to_empty` does the same by `empty_like`, which for a meta tensor imports sympy: half a second of a start.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(part, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def load_into(
    module: nn.Module, tensors: Mapping[str, Tensor], layout: Mapping[str, tuple[str, ...]], *, source: str
) -> None:
    """Copy `tensors` into the parameters and buffers that `layout` names.

    Raises ValueError listing every missing, unexpected or misshapen tensor; nothing is dropped silently.
    """
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    expected = [name for names in layout.values() for name in names]
    problems = [f"{name}: missing" for name in expected if name not in tensors]
    problems += [f"{name}: not part of this architecture" for name in sorted(set(tensors) - set(expected))]
    if not problems:
        for name, parts in layout.items():
            value = tensors[parts[0]] if len(parts) == 1 else torch.cat([tensors[part] for part in parts])
            if value.shape != state[name].shape:
                shapes = ", ".join(f"{part} {list(tensors[part].shape)}" for part in parts)
                problems.append(f"{shapes}: expected {list(state[name].shape)} in all")
            else:
                with torch.no_grad():
                    state[name].copy_(value)
    if problems:
        listing = "\n  ".join(problems[:12]) + (f"\n  and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise ValueError(f"{source}: the tensors do not fit the config:\n  {listing}")


def split_merged(module: nn.Module, layout: Mapping[str, tuple[str, ...]], sizes: Mapping[str, list[int]]) -> dict:
    """Return checkpoint tensors by name, the inverse of `load_into`. `sizes`: rows of each part of a merged tensor."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors: dict[str, Tensor] = {}
    for name, parts in layout.items():
        value = state[name].detach()
        pieces = [value] if len(parts) == 1 else list(value.split(sizes[name]))
        tensors |= {part: piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}
    return tensors


def fingerprint(folder: Path) -> str:
    """Hash a checkpoint without reading it all: the config and, of each shard, size, header and three samples."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in shard_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(header))
            for offset in (8 + header, size // 2, max(8 + header, size - 65536)):
                stream.seek(offset)
                digest.update(stream.read(65536))
    return digest.hexdigest()[:32]
