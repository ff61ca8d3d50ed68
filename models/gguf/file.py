"""A GGUF file: its keys and the location of its tensors. Format: ggml-org/ggml, docs/gguf.md, versions 2 and 3.

The header is parsed here, because the package `gguf` takes seconds for a vocabulary of 262,144: it makes an array of
every string. Tensor types, their block sizes and the dequantization are the package's.
"""

from __future__ import annotations

import math
import mmap
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from kernels.weights.ggml import FORMATS, GgmlRows
from kernels.weights.groups import GroupedRows
from models.quantized.mxfp4_layout import grouped

MAGIC, VERSIONS = b"GGUF", (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}  # by value type
MAX_ITEMS, MAX_DIMENSIONS = 2**31, 4
CHUNK_WEIGHTS = 2**17  # weights dequantized to fp32 at a time: they stay in the CPU cache, and no tensor is held twice
PLAIN = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.I64: np.int64,
}


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]  # as torch has it: rows first
    kind: GGMLQuantizationType
    offset: int  # of its first byte in the file
    size: int  # bytes

    def bytes_of(self, shape: tuple[int, ...], first: int) -> tuple[int, int]:
        """Return where the bytes of a part begin in the file, and their number."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.offset + first // block * block_bytes, math.prod(shape) // block * block_bytes


class Part(NamedTuple):
    """Rows of a tensor that lie end to end: one matrix of a stack, or one of several that are fused."""

    shape: tuple[int, ...]
    first: int = 0  # weights of the tensor before it


class GgufFile:
    """A memory-mapped GGUF file: opening it reads only the header, `read` only one tensor. See `open_gguf`."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError naming the file for one that is missing, damaged, split, or of another format."""
        self.path = Path(path)
        try:
            with self.path.open("rb") as stream:
                self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ValueError(f"{path}: cannot be read ({error})") from error
        try:
            header = Header(self._bytes)
            self.keys, self.tensors = header.keys, header.tensors
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"{path}: damaged or cut off ({error}); copy or download it again") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self.data_start = header.data_start
        if self.keys.get("split.count", 1) not in (0, 1):
            raise ValueError(
                f"{path}: split.count={self.keys['split.count']}: join the parts first (llama-gguf-split --merge)"
            )
        kinds = {info.kind: name for name, info in self.tensors.items()}
        for kind, name in kinds.items():
            if not dequantizes(kind):
                raise ValueError(f"{path}: {name}: the package gguf cannot dequantize tensors of type {kind.name}")
        for name, info in self.tensors.items():
            if info.offset + info.size > len(self._bytes):
                raise ValueError(
                    f"{path}: cut off: {name} ends at byte {info.offset + info.size:,} and the file has "
                    f"{len(self._bytes):,}; copy or download it again"
                )

    def need(self, key: str) -> Any:
        """Return the value of a key. Raises ValueError naming the key if it is missing."""
        if key not in self.keys:
            raise ValueError(f"{self.path}: the key {key} is missing")
        return self.keys[key]

    def read(self, name: str, dtype: torch.dtype, part: Part | None = None) -> Tensor:
        """Return the tensor's values in `dtype`, or those of a part. Needs little more memory than these."""
        info = self.tensors[name]
        shape, first = part or Part(info.shape)
        offset, size = info.bytes_of(shape, first)
        block, block_bytes = GGML_QUANT_SIZES[info.kind]
        step = CHUNK_WEIGHTS // block
        values = torch.empty(math.prod(shape), dtype=dtype)
        for first in range(0, size // block_bytes, step):
            count = min(step, size // block_bytes - first)
            raw = np.frombuffer(self._bytes, np.uint8, count * block_bytes, offset + first * block_bytes)
            values[first * block : (first + count) * block] = torch.from_numpy(widen(raw, info.kind))
        return values.view(shape)

    def blocks(self, name: str, part: Part | None = None) -> GgmlRows | None:
        """Return a matrix as it is in the mapped file; None if it is not in blocks."""
        info = self.tensors[name]
        if info.kind.name not in FORMATS or len(info.shape) < 2:
            return None
        data, offset = self._matrix(name, part)
        return GgmlRows(info.kind.name, data, source=f"{self.path}: {name}", offset=offset)

    def groups(self, name: str, part: Part | None = None) -> GroupedRows | None:
        """Return a matrix in MXFP4 as integers in groups; None for another tensor."""
        info = self.tensors[name]
        if info.kind is not GGMLQuantizationType.MXFP4 or len(info.shape) < 2:
            return None
        exponents, pairs = self._matrix(name, part)[0].unflatten(1, (-1, 17)).split([1, 16], -1)
        return grouped(
            f"{self.path}: {name}", exponents.squeeze(-1), lambda: torch.cat([pairs & 15, pairs >> 4], -1).flatten(1)
        )

    def _matrix(self, name: str, part: Part | None) -> tuple[Tensor, int]:
        """Return the bytes uint8 `[rows, bytes of a row]` of a mapped matrix, and the offset of the first."""
        info = self.tensors[name]
        shape, first = part or Part(info.shape)
        rows, (offset, size) = math.prod(shape[:-1]), info.bytes_of(shape, first)
        raw = np.frombuffer(self._bytes, np.uint8, size, offset)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(raw).view(rows, -1), offset

    def ggml_formats(self) -> dict[str, str]:
        """Return the formats of matrices that are stored in blocks, each with the first tensor in it."""
        blocks = [(info.kind.name, name) for name, info in self.tensors.items() if GGML_QUANT_SIZES[info.kind][0] > 1]
        return dict(reversed(blocks))

    def release(self) -> None:
        """Give up the pages of the file that were read. They stay in the system's cache while that has room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def samples(self, size: int) -> Iterator[bytes]:
        """Yield the header, then up to `size` bytes from the beginning, the middle and the end of the tensors' data."""
        end = len(self._bytes)
        yield self._bytes[: self.data_start]
        for offset in (self.data_start, (self.data_start + end) // 2, max(self.data_start, end - size)):
            yield self._bytes[offset : offset + size]

    def __len__(self) -> int:
        """Return the size of the file in bytes."""
        return len(self._bytes)


def open_gguf(path: str | Path) -> GgufFile:
    """Open a GgufFile; its header is parsed once while the file does not change. Raises ValueError as GgufFile does."""
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    return _open(Path(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)  # a target and a draft model
def _open(path: Path, modified: int, size: int) -> GgufFile:
    return GgufFile(path)


forget_files = _open.cache_clear  # lets go of vocabularies and merges: hundreds of thousands of strings


def dequantizes(kind: GGMLQuantizationType) -> bool:
    """Return whether a tensor type can be dequantized: some are for activations or indices."""
    try:
        widen(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def widen(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[Any]:
    """Dequantize the bytes of whole blocks to numbers `[count]`, in newly allocated memory."""
    if kind in PLAIN:
        return raw.view(PLAIN[kind]).copy()  # files are mapped read-only
    return dequantize(raw.reshape(1, -1), kind).reshape(-1)


class Header:
    """The header, which precedes the tensors' data. Raises struct.error if it is cut off, ValueError if invalid."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data, self._position = data, 0
        if data[:4] != MAGIC:
            raise ValueError("not a GGUF file: it does not begin with GGUF")
        self._position = 4
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            why = "written for big-endian machines" if swapped else f"GGUF version {version}"
            raise ValueError(f"{why}: only little-endian files of versions 2 and 3 are read")
        tensors, keys = self._number("Q"), self._number("Q")
        self.keys: dict[str, Any] = {}
        for _ in range(self._checked_count(keys)):
            name = self._string()
            if name in self.keys:
                raise ValueError(f"the key {name} is doubled")
            self.keys[name] = self._value(self._number("I"))
        infos = [self._info() for _ in range(self._checked_count(tensors))]
        alignment = self.keys.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={alignment}: must be a power of two")
        self.data_start = -(-self._position // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise ValueError(f"the tensor {name} is doubled")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(f"{name}: rows of {shape[-1]} are no whole blocks of {block} ({kind.name})")
            size = math.prod(shape) // block * block_bytes
            self.tensors[name] = TensorInfo(shape, kind, self.data_start + offset, size)

    def _info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"{name}: {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise ValueError(f"{name} {list(shape)}: is empty")
        kind = self._number("I")
        if kind not in tuple(GGMLQuantizationType):
            raise ValueError(
                f"{name}: tensor type {kind} is not known; a newer version of the package gguf may know it"
            )
        return name, shape, GGMLQuantizationType(kind), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == BOOL:
            return bool(self._number("B"))
        if kind == ARRAY:
            item_kind, count = self._number("I"), self._checked_count(self._number("Q"))
            if item_kind == ARRAY:
                raise ValueError("damaged: an array of arrays")
            if item_kind == STRING:
                return self._strings(count)
            if item_kind not in NUMBERS:
                return [self._value(item_kind) for _ in range(count)]
            layout = struct.Struct(f"<{count}{NUMBERS[item_kind]}")
            values = layout.unpack_from(self._data, self._position)
            self._position += layout.size
            return list(values)
        if kind not in NUMBERS:
            raise ValueError(f"damaged: {kind} is no type of a key's value")
        return self._number(NUMBERS[kind])

    def _number(self, letter: str) -> Any:
        layout = struct.Struct(f"<{letter}")
        (value,) = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Read strings: one loop without calls, since a vocabulary and its merges are hundreds of thousands of them."""
        data, position, end, read_size = self._data, self._position, len(self._data), struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            (size,) = read_size(data, position)
            position += 8
            if size > end - position:
                raise struct.error(f"a string of {size} bytes in {end - position}")
            strings.append(data[position : position + size].decode())
            position += size
        self._position = position
        return strings

    def _checked_count(self, count: int) -> int:
        """Return `count`, which may not exceed the bytes left; a damaged file may state any. Raises struct.error."""
        if count > min(MAX_ITEMS, len(self._data) - self._position):
            raise struct.error(f"{count} items in {len(self._data) - self._position} bytes")
        return count
