"""The interface between a quantisation method and the loader of a checkpoint, and what the methods share.

Small integers are packed into int32 words, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SECTION = "quantization_config"
WORD = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, in each nibble of a word, from the lowest


@dataclass(frozen=True)
class Scheme:
    """`parts`: the possible tensors `<layer>.<part>` of a quantised layer; all have the first, and no other layer has.

    `weight(layer, parts)` computes from these the weight `[N, K]` in fp32, or raises ValueError without naming the
    layer.
    """

    name: str  # for messages: "gptq, 4 bits in groups of 128"
    parts: tuple[str, ...]
    weight: Callable[[str, Mapping[str, Tensor]], Tensor]


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


def unpack(words: Tensor, bits: int, *, order: Sequence[int] | None = None) -> Tensor:
    """Unpack words `[R, C]` to int32 values `[R, C * 32 / bits]` from 0; a word's i-th field holds value `order[i]`."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    values = (words[..., None] >> shifts) & ((1 << bits) - 1)  # [R, C, 32 / bits]
    if order is not None:
        values = values[..., torch.tensor(order).argsort()]
    return values.flatten(-2)


def widen(values: Tensor, zeros: Tensor | int, scales: Tensor, groups: Tensor) -> Tensor:
    """Return `scale * (value - zero)` in fp32. values `[N, K]`; zeros, scales `[N, G]`; groups `[K]`, each column's."""
    zero = zeros[:, groups] if isinstance(zeros, Tensor) else zeros
    return scales.float()[:, groups] * (values - zero).float()
