"""Reading and writing safetensors, strict about names and shapes and independent of the architecture.

A parameter may be the concatenation of several checkpoint tensors (merged QKV); `layout` says which.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kernels.weights.ggml import GgmlRows
from kernels.weights.groups import GroupedRows
from models.config import read_json

log = logging.getLogger(__name__)

# (tensor name, number of rows) -> first and last + 1 of the wanted rows, None for all
Rows = Callable[[str, int], tuple[int, int] | None]
CHUNK_ROWS = 1024
HEADER_SIZE, MAX_HEADER = 8, 100_000_000  # bytes that state the header's size, and most that it may have
MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "ba_proj": ("b_proj", "a_proj"),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def shard_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder. Raises ValueError saying what was looked for."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return indexed_files(folder / INDEX)
    raise ValueError(f"{folder}: no weights; looked for {SINGLE} and {INDEX} (pickled .bin files are never read)")


def indexed_files(index: Path) -> list[Path]:
    """Return the files that an index of shards names, ascending. Raises ValueError unless all are beside it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is missing; download the checkpoint again")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise ValueError(
                f"{index.parent}: {index.name} names {name!r}, which is not there; download the checkpoint again"
            )
    return [index.parent / name for name in names]


def has_weights(folder: Path) -> bool:
    """Return whether a folder has all its safetensors files: for a hub id, maybe only the config was fetched."""
    try:
        return bool(shard_files(folder))
    except ValueError:
        return False


class NamedTensors(Mapping[str, Tensor]):
    """Base of mappings that read a tensor on access; `_sources` says where each comes from."""

    _sources: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:  # Mapping's default would read the tensor
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def blocks(self, name: str) -> GgmlRows | None:
        """Return a matrix as it is stored, if that is in blocks; nothing is read yet."""
        return None

    def groups(self, name: str) -> GroupedRows | None:
        """Return a matrix as it is stored, if that is in groups of small integers, which are not read yet."""
        return None

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a tensor without reading it."""
        raise NotImplementedError

    def release(self) -> None:
        """Give up what was read of memory-mapped files; it can be read again."""


class LazyTensors(NamedTensors):
    """The tensors of safetensors files, each read on access, and only the rows of it that `rows` selects.

    Raises ValueError for a truncated or invalid file and for a name that two files contain.
    """

    def __init__(self, files: Sequence[Path], rows: Rows | None = None) -> None:
        self._files, self._rows = files, rows
        self._shards = {file: _open(file) for file in files}
        self._begun: set[Path] = set()
        self._sources: dict[str, Path] = {}
        for file, shard in self._shards.items():
            for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                first = self._sources.setdefault(name, file)
                if first != file:
                    raise ValueError(f"{file.parent}: {name} is doubled, in {first.name} and in {file.name}")

    def __getitem__(self, name: str) -> Tensor:
        file = self._sources[name]
        if file not in self._begun:
            self._log_progress(file)
        if self._rows is None:
            return self._shards[file].get_tensor(name)
        piece = self.slice(name)
        row_range = self._rows(name, next(iter(piece.get_shape()), 0))
        return self._shards[file].get_tensor(name) if row_range is None else piece[row_range[0] : row_range[1]]

    def slice(self, name: str) -> Any:
        """Return safetensors' view of a tensor, which reads the rows that it is indexed with."""
        return self._shards[self._sources[name]].get_slice(name)

    def shape(self, name: str) -> Sequence[int]:
        return self.slice(name).get_shape()

    def place(self, name: str) -> tuple[Path, int]:
        """Return the file of a tensor, and its first byte in it."""
        file = self._sources[name]
        return file, _read_places(file)[name][0]

    def _log_progress(self, file: Path) -> None:
        sizes = {each: each.stat().st_size >> 20 for each in self._files}
        done, total = sum(sizes[each] for each in self._begun), sum(sizes.values())
        self._begun.add(file)
        progress = len(self._begun), len(sizes), done, total
        log.info("reading weights: file %d of %d, %d of %d MiB done (%s)", *progress, file.parent)


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file}: {_cut_off(file) or f'cannot be read ({error})'}; copy or download it again"
        ) from error


def _cut_off(file: Path) -> str | None:
    """Return which tensor ends beyond the file; None if there is no readable header, or no such tensor."""
    try:
        places, size = _read_places(file), file.stat().st_size
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    for name, (_, end) in places.items():
        if end > size:
            return f"cut off: {name} ends at byte {end:,} and the file has {size:,}"
    return None


def _read_places(file: Path) -> dict[str, tuple[int, int]]:
    """Return the first and last + 1 byte of each tensor in a safetensors file, in the order of the file."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(HEADER_SIZE), "little")
        header = json.loads(stream.read(min(size, MAX_HEADER)))
    start = HEADER_SIZE + size
    places = {name: info["data_offsets"] for name, info in header.items() if name != "__metadata__"}
    return {
        name: (start + first, start + end) for name, (first, end) in sorted(places.items(), key=lambda item: item[1])
    }


def equal_values(tensors: LazyTensors, first: str, second: str) -> bool:
    """Return whether two tensors hold the same numbers, whatever their dtypes. Reads a few rows at a time."""
    left, right = tensors.slice(first), tensors.slice(second)
    if left.get_shape() != right.get_shape():
        return False
    for row in range(0, next(iter(left.get_shape()), 0), CHUNK_ROWS):
        a, b = (piece[row : row + CHUNK_ROWS] for piece in (left, right))
        if not torch.equal(a, b.to(a.dtype)) or not torch.equal(a.to(b.dtype), b):
            return False
    return True


def allocate(module: nn.Module, device: str | torch.device) -> None:
    """Give the parameters and buffers of a module on the meta device uninitialized memory.

    `Module.to_empty` does the same by `empty_like`, which for a meta tensor imports sympy: half a second of a start.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(part, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def load_into(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    layout: Mapping[str, tuple[str, ...]],
    *,
    source: str,
    names: Set[str] | None = None,
) -> None:
    """Copy `tensors`, or those of `names` alone, into the parameters and buffers that `layout` names.

    Raises ValueError listing every missing, unexpected or misshapen tensor; nothing is dropped silently.
    """
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    expected = [name for names in layout.values() for name in names]
    present = set(tensors) if names is None else names & set(tensors)
    problems = [f"{name}: missing" for name in expected if name not in present]
    problems += [f"{name}: not part of this architecture" for name in sorted(present - set(expected))]
    if not problems:
        for name, parts in layout.items():
            values, wanted = [tensors[part] for part in parts], tuple(state[name].shape)
            sizes = [tuple(value.shape) for value in values]
            if merged_shape(sizes) != wanted:
                shapes = ", ".join(f"{part} {list(size)}" for part, size in zip(parts, sizes, strict=True))
                problems.append(f"{shapes}: expected {list(wanted)} in all")
            elif not values[0].is_meta:  # of `check_weights`
                with torch.no_grad():
                    state[name].copy_(values[0] if len(values) == 1 else torch.cat(values))
            del values  # before the next ones are read
    if problems:
        listing = "\n  ".join(problems[:12]) + (f"\n  and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise ValueError(f"{source}: the tensors do not fit the config:\n  {listing}")


def merged_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of tensors that are concatenated along dim 0, None if they cannot be."""
    if len(shapes) == 1:
        return shapes[0]
    alike = all(shapes) and len({shape[1:] for shape in shapes}) == 1
    return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if alike else None


def merged_parts(name: str) -> tuple[str, ...]:
    """Return the names of the checkpoint tensors that are concatenated along dim 0 to make the tensor `name`."""
    for merged, parts in MERGED.items():
        if merged in name:
            return tuple(name.replace(merged, part) for part in parts)
    return (name,)


def split_merged(
    module: nn.Module, layout: Mapping[str, tuple[str, ...]], heads: tuple[int, int] = (1, 1)
) -> dict[str, Tensor]:
    """Return checkpoint tensors by name, the inverse of `load_into`.

    `heads`: the numbers of query and of KV heads, by which a merged QKV projection is divided.
    """
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors: dict[str, Tensor] = {}
    for name, parts in layout.items():
        value = state[name].detach()
        pieces = value.split(rows_of_parts(len(value), len(parts), heads))
        tensors |= {part: piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}
    return tensors


def rows_of_parts(rows: int, parts: int, heads: tuple[int, int]) -> list[int]:
    """Return how many of a tensor's rows belong to each of the tensors that it was merged from.

    Three parts are those of a QKV projection with `heads` query and KV heads; others have equal sizes.
    """
    shares = (*heads, heads[1]) if parts == 3 else (1,) * parts
    return [share * rows // sum(shares) for share in shares]


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
