"""Matrices in blocks of 4- to 8-bit weights, as GGUF files store them (ggml's formats), kept as published.

A weight is scale * q, or scale * q + offset, with q an integer of the block: the number that the format defines, which
the package `gguf` rounds once, to fp32. Nothing is quantized again. A kernel reads a matrix as a linear layer or by
rows (`PackedLinear`, `weight_rows`); both read the same memory, which holds as many bits per weight as the file, in
another order (kernels/cpu/ggml.c; ggml_tiles.py for GPUs). Where `reads_ggml` returns False, the caller
dequantizes the matrix.

A head's weights can be quantized into such blocks, with the rounding of ggml's reference, which is the package's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.cpu.memory import zeros
from kernels.cpu.segments import PANEL, Segment
from kernels.dispatch import KINDS, address, threads, uses_triton
from kernels.weights.quantize import GgmlFormat, StoredMatrix

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # in the order of blocks.c
IN_GROUPS = ("MXFP4",)  # formats that kernels read as integers in groups (groups.py), under the same conditions
BLOCK = {name: (256 if name.endswith("_K") else 32) for name in FORMATS}  # weights of a block
GGML_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
GGML_FORMATS: tuple[GgmlFormat, ...] = get_args(GgmlFormat)
GgmlArguments = structure("blocks_args")  # of blocks.c


@dataclass(frozen=True)
class GgmlRows:
    """Rows of a matrix in one format. `data` uint8 `[N, bytes of a row]`, usually a view of a memory-mapped file.

    `order` int64 `[M]`: which of the N rows, in which order; None: all. `source` and `offset` are for messages: the
    name of the matrix, and the place of `data` in its file.
    """

    ggml_format: str
    data: Tensor
    order: Tensor | None = None
    source: str = "a matrix in blocks"
    offset: int = 0

    @property
    def count(self) -> int:
        return len(self.data) if self.order is None else len(self.order)

    @property
    def inputs(self) -> int:
        return self.data.shape[1] // GGML_BLOCK_BYTES[self.ggml_format] * BLOCK[self.ggml_format]


class GgmlMatrix(StoredMatrix[GgmlRows]):
    """A matrix whose parts are in blocks."""


def reads_ggml(ggml_format: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a kernel reads this format for rows of `dtype`."""
    if ggml_format not in (*FORMATS, *IN_GROUPS):
        return False
    return uses_triton(device) or (dtype in KINDS and device.type == "cpu" and library() is not None)


def in_blocks(weight: Tensor, ggml_format: GgmlFormat) -> GgmlMatrix | Tensor:
    """Quantize a head's weight `[N, K]`. What no kernel of a CPU reads is dequantized again, to the weight's dtype.

    Raises ValueError on another device without a kernel, and as `quantize_ggml` does.
    """
    key, device = f"engine.head_weights={ggml_format}", weight.device
    readable = reads_ggml(ggml_format.upper(), weight.dtype, device)
    if not readable and device.type != "cpu":
        raise ValueError(f"{key}: no kernel reads it on {device.type}; use engine.head_weights=int8 or int4")
    try:
        rows = quantize_ggml(weight, ggml_format)
    except ValueError as error:
        raise ValueError(f"{key}: {error}; use engine.head_weights=int8") from error
    return GgmlMatrix([rows], weight.dtype, device) if readable else dequantize_ggml(rows).to(weight.dtype)


def quantize_ggml(weight: Tensor, ggml_format: GgmlFormat) -> GgmlRows:
    """Quantize a matrix `[N, K]`. Raises ValueError if K is no multiple of 32, or a weight is beyond fp16's range."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    name, size = ggml_format.upper(), BLOCK[ggml_format.upper()]
    if weight.shape[1] % size:
        raise ValueError(f"a linear layer has {weight.shape[1]} inputs, no multiple of a block of {size}")
    largest = weight.abs().amax().item()
    if not largest <= torch.finfo(torch.float16).max:
        raise ValueError(f"a weight of {largest:.3g} is beyond the range of fp16, which scales and offsets have")
    data = quantize(weight.float().cpu().contiguous().numpy(), GGMLQuantizationType[name])
    return GgmlRows(name, torch.from_numpy(data))


def dequantize_ggml(rows: GgmlRows) -> Tensor:
    """Return all N weights of `rows`, whatever their order, in fp32 `[N, K]`."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(rows.data.numpy(), GGMLQuantizationType[rows.ggml_format]))


def damage(part: GgmlRows, block: int) -> ValueError:
    """Return the error for a part whose block of this number, from the first row on, has a scale that is not finite."""
    place = part.offset + block * GGML_BLOCK_BYTES[part.ggml_format]
    return ValueError(
        f"{part.source}: damaged: the {part.ggml_format} block at byte {place:,} has a scale that is no finite "
        "number; copy or download the file again"
    )


class Storage(NamedTuple):
    """How linear.c stores a format, exactly."""

    weight_format: str
    scales: str
    group: int  # weights that share a scale
    word_bits: int  # per weight
    scale_bytes: int  # per output and block


STORAGE = {
    "Q4_0": Storage("int4", "half_scale", 32, 4, 2),
    "Q4_1": Storage("uint4", "half_offset", 32, 4, 4),
    "Q5_0": Storage("int5", "half_scale", 32, 5, 2),
    "Q5_1": Storage("uint5", "half_offset", 32, 5, 4),
    "Q8_0": Storage("int8", "half_scale", 32, 8, 2),
    "Q4_K": Storage("uint4", "super_offset", 32, 4, 20),
    "Q5_K": Storage("uint5", "super_offset", 32, 5, 20),
    "Q6_K": Storage("int6", "super_scale", 16, 6, 18),
}


def ggml_segments(matrix: GgmlMatrix) -> list[Segment]:
    """Pack a matrix, neighbouring parts of one format together.

    Raises ValueError naming part and file offset for a block whose scale is not finite.
    """
    return [_segment(list(parts)) for _, parts in groupby(matrix.parts, key=lambda part: part.ggml_format)]


def _segment(parts: Sequence[GgmlRows]) -> Segment:
    lib = library()
    assert lib is not None
    name, inputs, outputs = parts[0].ggml_format, parts[0].inputs, sum(part.count for part in parts)
    storage, panels, blocks = STORAGE[name], -(-outputs // PANEL), inputs // BLOCK[name]
    words = zeros((panels, inputs * storage.word_bits // 32, PANEL), torch.int32)
    scale = zeros((panels, blocks, storage.scale_bytes * PANEL), torch.uint8)
    first = 0
    for part in parts:
        count = threads(part.count * inputs)
        damaged = torch.full((count,), -1, dtype=torch.int64)
        order = None if part.order is None else part.order.contiguous()
        assert part.data.is_contiguous()
        lib.blocks_pack(
            ctypes.byref(
                GgmlArguments(
                    data=part.data.data_ptr(),
                    order=address(order),
                    words=words.data_ptr(),
                    scale=scale.data_ptr(),
                    damaged=damaged.data_ptr(),
                    kind=FORMATS.index(name),
                    inputs=inputs,
                    outputs=part.count,
                    first=first,
                    row_bytes=part.data.shape[1],
                    threads=count,
                )
            )
        )
        if (worst := int(damaged.max())) >= 0:
            raise damage(part, worst)
        first += part.count
    return Segment(words, scale, outputs, storage.group, storage.weight_format, storage.scales)
