"""Prepares QKV projections for attention: QK norm, rotary embedding, and writing keys and values to their cache slots.

Contract: a row's bits depend on that row alone; its keys and values go to its own slot, and no other slot changes.
Values that are not finite are stored as `write_kv` states (kernels/copies.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.copies import write_kv
from kernels.dispatch import uses_triton
from kernels.elementwise import rms_norm, rotate
from kernels.operands import QKNorm


def rotate_and_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, norm: QKNorm | None, slots: Tensor, cache: Tensor, num_heads: int
) -> Tensor:
    """qkv `[R, nh + 2 nkv, D]`, cos and sin `[R, 1, D]`, slots `[R]`, cache `[2, nkv, slots, D]` -> q `[R, nh, D]`.

    On a GPU cos, sin and slots must not come from the kernel launched last (kernels/triton/dependent.py).
    """
    if uses_triton(qkv.device):
        from kernels.triton.rotary import rotate_and_write as fused

        return fused(qkv, cos, sin, norm, slots, cache, num_heads)
    rotated = num_heads + cache.shape[1]
    qk = qkv[:, :rotated]
    if norm is not None:
        q, k = qk.split([num_heads, cache.shape[1]], dim=1)
        parts = ((q, norm.q), (k, norm.k))
        qk = torch.cat([rms_norm(part, weight, norm.eps, centered=norm.centered) for part, weight in parts], dim=1)
    qk = rotate(qk, cos, sin)
    write_kv(cache, slots, qk[:, num_heads:], qkv[:, rotated:])
    return qk[:, :num_heads]
