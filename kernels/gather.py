"""Selects rows of several tensors and concatenates them: the features of accepted rows, as a head reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.triton import in_use


def gather_rows(parts: Sequence[Tensor], index: Tensor) -> Tensor:
    """parts `[R, H]` each, index `[n]` -> `[n, len(parts) * H]`, in new memory."""
    if in_use(index.device):
        from kernels.triton.gather import MOST
        from kernels.triton.gather import gather_rows as fused

        if len(parts) <= MOST:
            return fused(parts, index)
    return torch.cat([part[index] for part in parts], dim=-1)


def select_rows(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """The same for ascending rows that the host knows, of which nothing is copied to the device."""
    joined = torch.cat(list(parts), dim=-1)
    if len(rows) == len(joined):
        return joined
    spans, following = list[int](), -1  # lengths of what is left out and of what is selected, in turn
    for row in rows:
        if row == following:
            spans[-1] += 1
        else:
            spans += [row - max(following, 0), 1]
        following = row + 1
    return torch.cat([joined[:0], *joined.split([*spans, len(joined) - max(following, 0)])[1::2]])
