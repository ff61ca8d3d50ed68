"""Matrices in blocks of 4- to 8-bit weights, as GGUF files store them (ggml's formats), kept as published.

A weight is scale * q, or scale * q + offset, with q an integer of the block: the number that the format defines, which
the package `gguf` rounds once, to fp32. Nothing is quantised again. A kernel reads a matrix as a linear layer or by
rows (`PackedLinear`, `weight_rows`); both read the same memory, which holds as many bits per weight as the file, in
another order (kernels/cpu/blocks.c; kernels/block_tiles.py for GPUs). Where `reads_blocks` returns False, the caller
dequantises the matrix.

A head's weights can be quantised into such blocks, with the rounding of ggml's reference, which is the package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from kernels.cpu.library import KINDS, library
from kernels.quantise import BlockFormat
from kernels.triton import in_use

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # in the order of blocks.c
BLOCK = {name: (256 if name.endswith("_K") else 32) for name in FORMATS}  # weights of a block
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
BLOCK_FORMATS: tuple[BlockFormat, ...] = get_args(BlockFormat)


@dataclass(frozen=True)
class BlockRows:
    """Rows of a matrix in one format. `data` uint8 `[N, bytes of a row]`, usually a view of a memory-mapped file.

    `order` int64 `[M]`: which of the N rows, in which order; None: all. `source` and `offset` are for messages: the
    name of the matrix, and the place of `data` in its file.
    """

    block_format: str
    data: Tensor
    order: Tensor | None = None
    source: str = "a matrix in blocks"
    offset: int = 0

    @property
    def count(self) -> int:
        return len(self.data) if self.order is None else len(self.order)

    @property
    def inputs(self) -> int:
        return self.data.shape[1] // BLOCK_BYTES[self.block_format] * BLOCK[self.block_format]


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix `[N, K]` of several parts below one another, for rows of `dtype` on `device`, where it is packed.

    Parts may differ in their format.
    """

    parts: Sequence[BlockRows]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def shape(self) -> tuple[int, int]:
        (inputs,) = {part.inputs for part in self.parts}
        return sum(part.count for part in self.parts), inputs


def reads_blocks(block_format: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a kernel reads this format for rows of `dtype`."""
    if block_format not in FORMATS:
        return False
    return in_use(device) or (dtype in KINDS and device.type == "cpu" and library() is not None)


def in_blocks(weight: Tensor, block_format: BlockFormat) -> BlockMatrix | Tensor:
    """Quantise a head's weight `[N, K]`. What no kernel of a CPU reads is dequantised again, to the weight's dtype.

    Raises ValueError on another device without a kernel, and as `quantise_blocks` does.
    """
    key, device = f"engine.head_weights={block_format}", weight.device
    readable = reads_blocks(block_format.upper(), weight.dtype, device)
    if not readable and device.type != "cpu":
        raise ValueError(f"{key}: no kernel reads it on {device.type}; use engine.head_weights=int8 or int4")
    try:
        rows = quantise_blocks(weight, block_format)
    except ValueError as error:
        raise ValueError(f"{key}: {error}; use engine.head_weights=int8") from error
    return BlockMatrix([rows], weight.dtype, device) if readable else dequantise_blocks(rows).to(weight.dtype)


def quantise_blocks(weight: Tensor, block_format: BlockFormat) -> BlockRows:
    """Quantise a matrix `[N, K]`. Raises ValueError if K is no multiple of 32, or a weight is beyond fp16's range."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    name, size = block_format.upper(), BLOCK[block_format.upper()]
    if weight.shape[1] % size:
        raise ValueError(f"a linear layer has {weight.shape[1]} inputs, no multiple of a block of {size}")
    largest = weight.abs().amax().item()
    if not largest <= torch.finfo(torch.float16).max:
        raise ValueError(f"a weight of {largest:.3g} is beyond the range of fp16, which scales and offsets have")
    data = quantize(weight.float().cpu().contiguous().numpy(), GGMLQuantizationType[name])
    return BlockRows(name, torch.from_numpy(data))


def dequantise_blocks(rows: BlockRows) -> Tensor:
    """Return all N weights of `rows`, whatever their order, in fp32 `[N, K]`."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(rows.data.numpy(), GGMLQuantizationType[rows.block_format]))


def damage(part: BlockRows, block: int) -> ValueError:
    """Return the error for a part whose block of this number, from the first row on, has a scale that is not finite."""
    place = part.offset + block * BLOCK_BYTES[part.block_format]
    return ValueError(
        f"{part.source}: damaged: the {part.block_format} block at byte {place:,} has a scale that is no finite "
        "number; copy or download the file again"
    )
