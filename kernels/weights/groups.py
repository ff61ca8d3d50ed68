"""Matrices of 4- and 8-bit numbers with a scale, and maybe a zero point, per group of inputs, kept as published.

GPTQ, AWQ and compressed-tensors store linear layers so. A weight is scale * (q - zero), unrounded: that is what these
formats define (GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978). Their libraries round that product, and differ in how:
those that dequantize first do it to the 16 bits of the scales, fused kernels do not. Here, too, nothing is rounded
before the sum of a group. With scales of 16 bits the product is exact in fp32; with scales of 32 bits `widened` rounds
it once to fp32. Where `why_unread` names a reason, the caller dequantizes the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cpu.library import library
from kernels.cpu.segments import Segment, packed, panels
from kernels.dispatch import KINDS, LANES, uses_triton
from kernels.weights.ggml_tiles import WIDTH
from kernels.weights.quantize import NarrowFormat, StoredMatrix, quantize

SCALES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bf16"}  # as in cpu/segments.py
NAN = 0x7F  # of float8_e4m3fn, without its sign


@dataclass(frozen=True)
class GroupedRows:
    """A matrix `[N, K]` whose rows consist of G groups of columns.

    `scales` `[N, G]`; `groups` int64 `[K]`: the group of each column; None: neighbours. `integers()` reads q `[N, K]`,
    int8 (float8_e4m3fn in format fp8), and the zero points int8 `[N, G]`, None if all are zero. Both are centered: int4
    is from -8 to 7. `source` is for messages, the name of the matrix.
    """

    weight_format: NarrowFormat
    inputs: int
    scales: Tensor
    groups: Tensor | None
    integers: Callable[[], tuple[Tensor, Tensor | None]]
    source: str = "a matrix in groups"

    @property
    def count(self) -> int:
        return len(self.scales)

    @property
    def group(self) -> int:
        """The number of columns of a group; for groups of different sizes their mean, rounded down."""
        return self.inputs // self.scales.shape[1]

    @property
    def ggml_format(self) -> str:
        return f"{self.weight_format} in groups of {self.group}"

    def order(self) -> Tensor | None:
        """Return the columns int64 `[K]` by group, those of each group in order; None if they are so already."""
        return None if self.groups is None else self.groups.argsort(stable=True)

    def of(self, rows: Tensor) -> GroupedRows:
        """Return the matrix of `rows` int64 `[M]`, in their order."""

        def integers() -> tuple[Tensor, Tensor | None]:
            values, zeros = self.integers()
            return values[rows], None if zeros is None else zeros[rows]

        return replace(self, scales=self.scales[rows], integers=integers)

    def widened(self) -> Tensor:
        """Return the matrix in fp32."""
        values, zeros = self.integers()
        groups = torch.arange(self.inputs) // self.group if self.groups is None else self.groups
        centered = values.float() if zeros is None else values.float() - zeros.float()[:, groups]
        return self.scales.float()[:, groups] * centered


class GroupedMatrix(StoredMatrix[GroupedRows]):
    """A matrix whose parts are in groups."""


def in_groups(weight: Tensor, weight_format: NarrowFormat) -> GroupedMatrix:
    """Quantize a weight `[N, K]` (quantize.py); a group of int8 and fp8 is a row."""
    stored, scale = quantize(weight, weight_format)
    rows = GroupedRows(weight_format, weight.shape[1], scale.view(len(weight), -1), None, lambda: (stored, None))
    return GroupedMatrix([rows], weight.dtype, weight.device)


def sound_integers(rows: GroupedRows) -> tuple[Tensor, Tensor | None]:
    """Return `rows.integers()`. Raises ValueError naming the matrix for a weight that is not a number."""
    values, zeros = rows.integers()
    if rows.weight_format == "fp8" and bool(((values.view(torch.uint8) & NAN) == NAN).any()):
        raise ValueError(f"{rows.source}: damaged: a weight is not a number; copy or download the file again")
    return values, zeros


def why_unread(rows: GroupedRows, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why no kernel reads a matrix for rows of `dtype`; None if one does."""
    gpu = uses_triton(device)
    if not gpu and (dtype not in KINDS or device.type != "cpu" or library() is None):
        name = str(dtype).removeprefix("torch.")
        return f"no kernel reads {rows.ggml_format} ({rows.source}) for {name} on {device.type}"
    if rows.scales.dtype not in SCALES:
        return f"no kernel reads scales of {rows.scales.dtype} ({rows.source})"
    sizes = torch.tensor([rows.group]) if rows.groups is None else rows.groups.bincount(minlength=rows.scales.shape[1])
    if not bool((sizes == sizes[0]).all()):
        return f"no kernel reads groups of different sizes ({rows.source})"
    if gpu:
        step = 16 if rows.weight_format == "int4" else 32
        divides = WIDTH % rows.group == 0 and rows.group % step == 0
        if not divides and rows.group % WIDTH and rows.group != rows.inputs:
            return (
                f"no kernel for GPUs reads {rows.ggml_format} ({rows.source}): a group must be a row, a multiple of "
                f"{WIDTH}, or a part of {WIDTH} that is a multiple of {step}"
            )
    elif rows.group % LANES:
        return f"no kernel reads groups of {rows.group}, which is no multiple of {LANES} ({rows.source})"
    return None


def grouped_segments(matrix: GroupedMatrix) -> list[Segment]:
    """Pack a matrix, each part separately. Raises ValueError naming the part for a weight that is not a number."""
    return [_segment(rows) for rows in matrix.parts]


def _segment(rows: GroupedRows) -> Segment:
    (values, zeros), order = sound_integers(rows), rows.order()
    order = None if order is None else order.int()
    words = packed(values, rows.weight_format, order)
    scale, kind = panels(rows.scales), SCALES[rows.scales.dtype]
    if zeros is not None:
        scale = torch.cat([_bytes(scale), _bytes(panels(zeros))], dim=-1)
    scales = f"{kind}_scale" if zeros is None else f"{kind}_zero"
    return Segment(words, scale, rows.count, rows.group, rows.weight_format, scales, order)


def _bytes(values: Tensor) -> Tensor:
    """`[panels, groups, 64]` -> uint8 `[panels, groups, 64 * bytes of a number]`."""
    return values.contiguous().view(torch.uint8)
