"""Gates of hybrids' layers: of gated delta nets (arXiv 2412.06464), and of attention's output.

C (kernels/cpu/delta_net.c, rows.c) or torch computes them.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import KINDS, LANES
from kernels.elementwise import rms_norm, silu_mul, uniform
from kernels.recurrence import native_for

softplus = partial(uniform, partial(F.softplus, beta=1.0, threshold=20.0))


def delta_gates(ba: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return decay and gain `[..., H]` of a gated delta net from its projections b and a, concatenated `[..., 2 H]`.

    gain = sigmoid(b), decay = exp(-exp(A_log) softplus(a + dt_bias)), all in fp32.
    """
    if (native := native_for(LANES, ba, A_log, dt_bias)) is None or ba.dtype is not torch.float32:
        b, a = ba.chunk(2, dim=-1)
        return torch.exp(-A_log.exp() * softplus(a + dt_bias)), uniform(torch.sigmoid, b)
    ba, heads = ba.contiguous(), len(A_log)
    decay, gain = torch.empty(2, *ba.shape[:-1], heads)
    pointers = [x.data_ptr() for x in (ba, A_log, dt_bias, decay, gain)]
    native.delta_gates(*pointers, ba.numel() // (2 * heads), heads)
    return decay, gain


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x, in fp32, times SiLU(z), both `[..., V]`; x is rounded to the dtype of z before."""
    if (native := native_for(x.shape[-1], z, weight)) is None:
        normed = rms_norm(x.to(z.dtype), weight, eps)
        return silu_mul(torch.cat([z, normed], dim=-1).float()).to(z.dtype)
    x, z = x.contiguous(), z.contiguous()
    out = torch.empty_like(z)
    pointers = [each.data_ptr() for each in (x, z, weight, out)]
    native.gated_norm(*pointers, x.numel() // len(weight), len(weight), eps, KINDS[z.dtype])
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Return x times the sigmoid of `gate`, both `[..., I]`, rounded once."""
    if (native := native_for(x.shape[-1], x, gate)) is None:
        return (x * uniform(torch.sigmoid, gate.float())).to(x.dtype)
    x, gate, out = x.contiguous(), gate.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    native.sigmoid_mul(x.data_ptr(), gate.data_ptr(), out.data_ptr(), x.numel(), KINDS[x.dtype])
    return out
