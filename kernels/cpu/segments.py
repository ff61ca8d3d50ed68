"""The weights of linear layers, packed as linear.c reads them."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.cpu.memory import zeros
from kernels.dispatch import address, threads
from kernels.weights.quantize import NarrowFormat

# of the words, as in widen.h, and of the scales, as in scales.h
FORMATS = {"int4": 0, "int8": 1, "fp8": 2, "uint4": 4, "int5": 5, "uint5": 6, "int6": 7}
WIDE = {torch.float32: 3, torch.bfloat16: 8}  # the format of weights in the dtype of the rows, "same"
SCALES = {"float_scale": 0, "half_scale": 1, "half_offset": 2, "super_offset": 3, "super_scale": 4}
SCALES |= {"bf16_scale": 5, "float_zero": 6, "half_zero": 7, "bf16_zero": 8}
PANEL, WIDE_PANEL = 64, 32  # outputs that linear.c computes at once; the second for unquantized weights
CHUNK = 64 * PANEL  # outputs packed at a time, since packing needs 32 bits per weight
PackArguments = structure("pack_args")  # of pack.c


class Segment(NamedTuple):
    """Outputs of a layer whose weights are stored in one format, packed for linear.c."""

    words: Tensor  # int32 [panels, words of a row, 64 or 32]
    scale: Tensor | None
    outputs: int
    group: int  # weights that share a scale
    weight_format: str  # of FORMATS
    scales: str = "float_scale"  # of SCALES
    order: Tensor | None = None  # int32 [K] the column of each input of `words`; None: in order


def quantized_segment(stored: Tensor, scale: Tensor, weight_format: NarrowFormat) -> Segment:
    """Pack the output of `quantize`: `stored` `[N, K]`, `scale` `[N]` or `[N, K / group]`."""
    scale = scale.view(len(stored), -1)
    group = stored.shape[1] // scale.shape[1]
    return Segment(packed(stored, weight_format), panels(scale), len(stored), group, weight_format)


def panels(values: Tensor, size: int = PANEL) -> Tensor:
    """`[N, C]` -> `[N / size, C, size]`, the last panel padded with zeros."""
    filled = F.pad(values, (0, 0, 0, -len(values) % size))
    return filled.unflatten(0, (-1, size)).transpose(1, 2).contiguous()


def wide_panels(weight: Tensor) -> Tensor:
    """Pack `[N, K]` in fp32 or bf16 -> words `[N / 32, K, 32]` or `[N / 32, K / 2, 32]` int32."""
    count, words = len(weight), weight.contiguous().view(torch.int32)
    out = zeros((-(-count // WIDE_PANEL), words.shape[1], WIDE_PANEL), torch.int32)
    for first in range(0, count, CHUNK):
        rows = words[first : first + CHUNK]
        out[first // WIDE_PANEL : -(-(first + len(rows)) // WIDE_PANEL)] = panels(rows, WIDE_PANEL)
    return out


def packed(stored: Tensor, weight_format: NarrowFormat, order: Tensor | None = None) -> Tensor:
    """Pack 8-bit `[N, K]` -> words `[N / 64, K / per_word, 64]` int32, `per_word` in each, in pairs (widen.h).

    `order` int32 `[K]`: the column of each input.
    """
    lib, (outputs, inputs), bits = library(), stored.shape, 4 if weight_format == "int4" else 8
    assert lib is not None
    stored = stored.contiguous()
    out = zeros((-(-outputs // PANEL), inputs * bits // 32, PANEL), torch.int32)
    arguments = PackArguments(
        values=stored.data_ptr(),
        order=address(order),
        words=out.data_ptr(),
        inputs=inputs,
        outputs=outputs,
        bits=bits,
        threads=threads(outputs * inputs),
    )
    lib.pack_numbers(ctypes.addressof(arguments))
    return out
