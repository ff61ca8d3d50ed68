"""Matrices in blocks of 4- to 8-bit weights, as GGUF files store them (ggml's formats), kept as published.

A weight is scale * q, or scale * q + offset, with q an integer of the block: the number that the format defines, which
the package `gguf` rounds once, to fp32. Nothing is quantized again. A kernel reads a matrix as a linear layer or by
rows (`PackedLinear`, `weight_rows`); both read the same memory, which holds as many bits per weight as the file, in
another order (kernels/cpu/ggml.c; kernels/ggml_tiles.py for GPUs). Where `reads_ggml` returns False, the caller
dequantizes the matrix.

A head's weights can be quantized into such blocks, with the rounding of ggml's reference, which is the package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from kernels.cpu.library import KINDS, library
from kernels.quantize import GgmlFormat
from kernels.triton import in_use

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # in the order of blocks.c
BLOCK = {name: (256 if name.endswith("_K") else 32) for name in FORMATS}  # weights of a block
GGML_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
GGML_FORMATS: tuple[GgmlFormat, ...] = get_args(GgmlFormat)


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


@dataclass(frozen=True)
class GgmlMatrix:
    """A matrix `[N, K]` of several parts below one another, for rows of `dtype` on `device`, where it is packed.

    Parts may differ in their format.
    """

    parts: Sequence[GgmlRows]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def shape(self) -> tuple[int, int]:
        (inputs,) = {part.inputs for part in self.parts}
        return sum(part.count for part in self.parts), inputs


def reads_ggml(ggml_format: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a kernel reads this format for rows of `dtype`."""
    if ggml_format not in FORMATS:
        return False
    return in_use(device) or (dtype in KINDS and device.type == "cpu" and library() is not None)


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
