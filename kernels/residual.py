"""Residual layers of several heads in one call: `x + silu(W x + b)` with separate weights per head (Medusa).

Contract: a row's bits depend on that row and its head's weights alone, not on how many rows or heads share the call.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.elementwise import uniform


def residual_silu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[G, R, H]`, or `[1, R, H]` for all heads, weight `[G, H, H]`, bias `[G, H]` -> `[G, R, H]`. No gradients."""
    if uses_triton(x.device):
        from kernels.triton.residual import residual_silu as fused

        return fused(x, weight, bias)
    products = x @ weight.transpose(1, 2)
    return x + uniform(F.silu, products if bias is None else products + bias[:, None])
