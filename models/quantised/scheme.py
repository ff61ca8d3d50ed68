"""The interface between a quantisation method and the loader of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

SECTION = "quantization_config"


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
