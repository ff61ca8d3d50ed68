"""MXFP4 (OCP Microscaling Formats, version 1.0) as gpt-oss's experts are stored: groups of 32 numbers with a scale.

`blocks` uint8 `[N, K / 32, 16]`: two numbers of 4 bits (e2m1) in a byte, the first in its low bits; `scales` uint8
`[N, K / 32]`: an exponent of two plus 127 (e8m0). Twice a number is a whole one, so a layer is read as one of 8 bits.
In a GGUF file (models/gguf/file.py) a byte holds numbers i and i + 16 of a group, after the group's scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kernels.weights.groups import GroupedRows
from models.fields import Fields
from models.quantized.scheme import Scheme, need, unpack

GROUP, BIAS, NAN = 32, 127, 255
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers without a sign, which is the highest bit


def read(fields: Fields) -> Scheme:
    fields.ignore("modules_to_not_convert", "dequantize")  # the tensors' names say which layers are converted
    return Scheme(f"mxfp4, 4 bits in groups of {GROUP}", ("blocks", "scales"), _read_layer)


def _read_layer(layer: str, parts: Mapping[str, Tensor]) -> GroupedRows:
    exponents = need(parts, "scales")
    blocks = need(parts, "blocks", *exponents.shape, GROUP // 2)
    if exponents.dtype != torch.uint8 or blocks.dtype != torch.uint8:
        raise ValueError(f"blocks {blocks.dtype}, scales {exponents.dtype}: expected {torch.uint8}")
    return grouped(f"{layer}.scales", exponents, lambda: unpack(blocks.flatten(1), 4))


def grouped(name: str, exponents: Tensor, codes: Callable[[], Tensor]) -> GroupedRows:
    """Return a matrix by its exponents uint8 `[N, K / 32]`, called `name`, and numbers uint8 `[N, K]`, read on call."""
    numbers = torch.tensor([*DOUBLED, *(-number for number in DOUBLED)], dtype=torch.int8)

    def integers() -> tuple[Tensor, None]:
        if bool((exponents == NAN).any()):
            raise ValueError(f"{name}: damaged: a scale is not a number; copy or download the file again")
        return numbers[codes().int()], None

    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - BIAS - 1).bfloat16()
    return GroupedRows("int8", exponents.shape[1] * GROUP, scales, None, integers, name)
