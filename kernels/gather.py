"""Gathers rows of several tensors and concatenates them: the features of accepted rows, as a head reads them."""

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
