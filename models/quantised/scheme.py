"""What a quantised checkpoint is to whoever loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

SECTION = "quantization_config"


@dataclass(frozen=True)
class Scheme:
    """`parts`: what a quantised layer may be stored as, `<layer>.<part>`; the first is in each of these and no other.

    `weight(layer, parts)` makes of these the weight `[N, K]` in fp32, or raises ValueError without naming the layer.
    """

    name: str  # for people: "gptq, 4 bits in groups of 128"
    parts: tuple[str, ...]
    weight: Callable[[str, Mapping[str, Tensor]], Tensor]


def need(parts: Mapping[str, Tensor], name: str, *shape: int) -> Tensor:
    """The part, of that shape if one is given."""
    if name not in parts:
        raise ValueError(f"{name}: missing")
    if shape and tuple(parts[name].shape) != shape:
        raise ValueError(f"{name} {list(parts[name].shape)}: expected {list(shape)}")
    return parts[name]


def group_count(columns: int, group_size: int) -> int:
    """Groups of a row of `columns`; -1 is one group. Raises ValueError when they do not come out even."""
    size = columns if group_size == -1 else group_size
    if columns % size:
        raise ValueError(f"{columns} columns are no multiple of group_size={group_size}")
    return columns // size
