"""The interface between a quantization method and the loader of a checkpoint, and what the methods share.

Small integers are packed into int32 words, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.weights.groups import GroupedRows
from kernels.weights.quantize import NarrowFormat
from models.config import SECTION as SECTION

WORD = 32
INTEGERS: dict[int, NarrowFormat] = {4: "int4", 8: "int8"}  # by bits
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, in each nibble of a word, from the lowest


@dataclass(frozen=True)
class Scheme:
    """`parts`: the possible tensors `<layer>.<part>` of a quantized layer; all have the first, and no other layer has.

    `read(layer, parts)` describes the weight `[N, K]`, reading few of these tensors, or raises ValueError without
    naming the layer.
    """

    name: str  # for messages: "gptq, 4 bits in groups of 128"
    parts: tuple[str, ...]
    read: Callable[[str, Mapping[str, Tensor]], GroupedRows]


def need(parts: Mapping[str, Tensor], name: str, *shape: int) -> Tensor:
    """Return the part. Raises ValueError if it is missing, or not of `shape` if that is given."""
    if name not in parts:
        raise ValueError(f"{name}: missing")
    if shape and tuple(parts[name].shape) != shape:
        raise ValueError(f"{name} {list(parts[name].shape)}: expected {list(shape)}")
    return parts[name]


def group_count(columns: int, group_size: int) -> int:
    """Return the groups of a row of `columns`; -1 means one. Raises ValueError if `group_size` does not divide it."""
    size = columns if group_size == -1 else group_size
    if columns % size:
        raise ValueError(f"{columns} columns are no multiple of group_size={group_size}")
    return columns // size


def column_groups(parts: Mapping[str, Tensor], name: str, columns: int, count: int) -> Tensor | None:
    """Return the group of each column, `[columns]`, as the part says; None for equal groups of neighbours.

    All numbers are -1 where nothing was reordered. Raises ValueError for a group that is none of `count`.
    """
    if name not in parts:
        return None
    groups = parts[name].long()
    if groups.shape == (columns,) and bool((groups == -1).all()):
        return None
    if groups.shape != (columns,) or not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise ValueError(f"{name}: must name one of {count} groups for each of {columns} columns")
    in_order = columns % count == 0 and torch.equal(groups, torch.arange(columns) // (columns // count))
    return None if in_order else groups


def unpack(words: Tensor, bits: int, *, order: Sequence[int] | None = None) -> Tensor:
    """Unpack words `[R, C]` of 4- or 8-bit values to uint8 `[R, C * 32 / bits]`; a word's i-th is value `order[i]`."""
    values = words.contiguous().view(torch.uint8)
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
    if order is not None:
        values = values.unflatten(-1, (-1, WORD // bits))[..., torch.tensor(order).argsort()].flatten(-2)
    return values


def centered(values: Tensor, bits: int) -> Tensor:
    """Return values, uint8 from 0, less 2^(bits - 1): int8, in any layout."""
    return (values - (1 << (bits - 1))).view(torch.int8)


def centered_zeros(values: Tensor, bits: int) -> Tensor | None:
    """Return zero points as `centered` does; None if all become zero: the weights are symmetric."""
    zeros = centered(values, bits)
    return zeros if bool(zeros.any()) else None
