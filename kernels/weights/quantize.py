"""Matrices in few bits, and weights quantized to 8 or 4 bits: nearest multiples of a scale, symmetric about zero.

Scales are per output feature (int8, fp8) or, for int4, which is too coarse for one scale per row, per group of
neighbouring weights in a row. ggml's blocks of 32 weights, the other formats of WeightFormat, are quantized in
ggml.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

NarrowFormat = Literal["int8", "fp8", "int4"]
GgmlFormat = Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
TargetFormat = Literal["same"] | NarrowFormat
WeightFormat = TargetFormat | GgmlFormat  # of a head
NARROW_FORMATS: tuple[NarrowFormat, ...] = get_args(NarrowFormat)
LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.int8}
GROUPS = (128, 64, 32)  # the first that divides a row


def group_size(inputs: int) -> int:
    """Return how many weights of a row of `inputs` share a scale in int4. Raises ValueError if no group divides it."""
    for size in GROUPS:
        if inputs % size == 0:
            return size
    raise ValueError(
        f"int4: a linear layer has {inputs} inputs, no multiple of a group of {GROUPS[-1]}; use int8 "
        "(engine.weights, or engine.head_weights and engine.draft_weights for drafters)"
    )


def quantize(weight: Tensor, weight_format: NarrowFormat) -> tuple[Tensor, Tensor]:
    """Quantize weight `[N, K]` to int8 (int4 too, from -7 to 7) or float8_e4m3fn; also returns fp32 scales.

    Scales are `[N]`, for int4 `[N, K / group]`; each maps the largest weight it covers to the format's largest value.
    Where all weights are zero it is 1.
    """
    values = weight.float()
    if weight_format == "int4":
        values = values.unflatten(1, (-1, group_size(weight.shape[1])))
    largest = values.abs().amax(-1)
    scale = torch.where(largest > 0, largest / LARGEST[weight_format], 1.0)
    scaled = values / scale[..., None]
    return (scaled if weight_format == "fp8" else scaled.round()).to(STORED[weight_format]).view(weight.shape), scale


def widen(stored: Tensor, scale: Tensor) -> Tensor:
    """Dequantize the output of `quantize` to fp32 `[N, K]`."""
    groups = stored.view(*scale.shape, -1) if scale.ndim == 2 else stored
    return (groups.float() * scale[..., None]).view(stored.shape)


class StoredRows(Protocol):
    """Rows of a matrix as they are stored in one format."""

    @property
    def count(self) -> int: ...
    @property
    def inputs(self) -> int: ...


Rows = TypeVar("Rows", bound=StoredRows)


@dataclass(frozen=True)
class StoredMatrix(Generic[Rows]):
    """A matrix `[N, K]` of several parts below one another, for rows of `dtype` on `device`, where it is packed.

    Parts may differ in their format.
    """

    parts: Sequence[Rows]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def shape(self) -> tuple[int, int]:
        (inputs,) = {part.inputs for part in self.parts}
        return sum(part.count for part in self.parts), inputs
