"""Packing of matrices in groups (kernels/groups.py) for linear.c."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.linear import Segment, packed, panels
from kernels.groups import GroupedMatrix, GroupedRows, sound_integers

KINDS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bf16"}  # of scales, as SCALES of linear.py


def grouped_segments(matrix: GroupedMatrix) -> list[Segment]:
    """Pack a matrix, each part separately. Raises ValueError naming the part for a weight that is not a number."""
    return [_segment(rows) for rows in matrix.parts]


def _segment(rows: GroupedRows) -> Segment:
    (values, zeros), order = sound_integers(rows), rows.order()
    order = None if order is None else order.int()
    words = packed(values, rows.weight_format, order)
    scale, kind = panels(rows.scales), KINDS[rows.scales.dtype]
    if zeros is not None:
        scale = torch.cat([_bytes(scale), _bytes(panels(zeros))], dim=-1)
    scales = f"{kind}_scale" if zeros is None else f"{kind}_zero"
    return Segment(words, scale, rows.count, rows.group, rows.weight_format, scales, order)


def _bytes(values: Tensor) -> Tensor:
    """`[panels, groups, 64]` -> uint8 `[panels, groups, 64 * bytes of a number]`."""
    return values.contiguous().view(torch.uint8)
