"""Weights in 8 or 4 bits: nearest multiples of a scale, symmetric about zero.

A scale belongs to an output feature (int8, fp8) or, of 4 bits, which are too few for a whole row, to a group of weights
beside each other in it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NarrowFormat = Literal["int8", "fp8", "int4"]
WeightFormat = Literal["same", "int8", "fp8", "int4"]
LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.int8}
GROUPS = (128, 64, 32)  # the first that divides a row


def group_size(inputs: int) -> int:
    """Weights of a row of `inputs` that share a scale in int4. Raises ValueError if no group divides it."""
    for size in GROUPS:
        if inputs % size == 0:
            return size
    raise ValueError(
        f"engine.weights=int4: a linear layer has {inputs} inputs, no multiple of a group of {GROUPS[-1]}; "
        "use engine.weights=int8"
    )


def narrow_bytes(outputs: int, inputs: int, weight_format: NarrowFormat) -> int:
    """Of a weight `[outputs, inputs]` with its scales."""
    if weight_format == "int4":
        return outputs * (inputs // 2 + 4 * inputs // group_size(inputs))
    return outputs * (inputs + 4)


def quantise(weight: Tensor, weight_format: NarrowFormat) -> tuple[Tensor, Tensor]:
    """weight `[N, K]` -> its nearest multiples, int8 (of int4 too, from -7 to 7) or float8_e4m3fn, and fp32 scales.

    Scales are `[N]`, of int4 `[N, K / group]`: the largest weight that one covers becomes the format's largest. Where
    all are zero it is 1.
    """
    own = weight.float()
    if weight_format == "int4":
        own = own.unflatten(1, (-1, group_size(weight.shape[1])))
    most = own.abs().amax(-1)
    scale = torch.where(most > 0, most / LARGEST[weight_format], 1.0)
    scaled = own / scale[..., None]
    return (scaled if weight_format == "fp8" else scaled.round()).to(STORED[weight_format]).view(weight.shape), scale


def widen(stored: Tensor, scale: Tensor) -> Tensor:
    """What `quantise` answered as fp32 `[N, K]`."""
    groups = stored.view(*scale.shape, -1) if scale.ndim == 2 else stored
    return (groups.float() * scale[..., None]).view(stored.shape)


def pack_nibbles(stored: Tensor) -> Tensor:
    """int4's `[N, K]` -> `[N, K / 2]`: a group's first half in the low nibbles of its bytes, its second in the high."""
    low, high = stored.unflatten(1, (-1, group_size(stored.shape[1]))).chunk(2, dim=2)
    return (low & 15 | high << 4).flatten(1)
