"""Convolution with two taps along the rows of a block: each row is mixed with the one before it (DFlash2).

Contract: out[t] = (base[0] + delta[t, 0]) z[t] + (base[1] + delta[t, 1]) z[t - 1], with nothing before the first row of
a block. `delta` has one number for each group of channels. Sums are in fp32 and rounded once. The fused decoder does
the same in C (kernels/cpu/rows.c), a GPU in one launch (kernels/triton/convolution.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import uses_triton

INPUT, OUTPUT = 0, 1  # sides of a sublayer


def two_taps(z: Tensor, base: Tensor, deltas: Tensor, side: int, rows: int) -> Tensor:
    """Convolve z `[..., H]`, blocks of `rows` rows each, by the kernels of one side.

    base `[2, 2, H]`: by side and tap; deltas `[..., 4 H / group]`: by side, tap and group of channels.
    """
    if uses_triton(z.device) and not torch.is_grad_enabled() and z.dtype == base.dtype == deltas.dtype:
        from kernels.triton import convolution as gpu

        size = z.shape[-1]
        flat = z.reshape(-1, size), base, deltas.reshape(-1, deltas.shape[-1])
        return gpu.two_taps(*flat, side, rows).view(z.shape)
    size, dtype = z.shape[-1], torch.promote_types(z.dtype, base.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    added = deltas.unflatten(-1, (2, 2, -1))[..., side, :, :].to(wide)
    taps = base[side].to(wide) + added.repeat_interleave(size // added.shape[-1], dim=-1)
    now = z.to(wide)
    before = F.pad(now.reshape(-1, rows, size)[:, :-1], (0, 0, 1, 0)).view(z.shape)
    return (taps[..., 0, :] * now + taps[..., 1, :] * before).to(dtype)
