"""Small integers packed into int32 words, the first in the lowest bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, in each nibble of a word, from the lowest


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
