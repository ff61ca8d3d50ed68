"""Packing of matrices in blocks for linear.c, in blocks.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels.cpu.declarations import fields
from kernels.cpu.library import address, library, threads
from kernels.cpu.linear import PANEL, Segment
from kernels.cpu.memory import zeros
from kernels.ggml import BLOCK, FORMATS, damage

if TYPE_CHECKING:
    from kernels.ggml import GgmlMatrix, GgmlRows


class Arguments(ctypes.Structure):
    """blocks_args of blocks.c."""

    __slots__ = ()
    _fields_ = fields("blocks_args")


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
                Arguments(
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
