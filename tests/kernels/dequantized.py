"""The weights that blocks of ggml stand for, in torch: what the kernels that read blocks are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.weights.ggml import GGML_BLOCK_BYTES, GgmlRows
from kernels.weights.ggml_tiles import STORAGE, _factors, _integers, _six_bits


def dequantize(rows: GgmlRows) -> Tensor:
    """Return the weights `[N, K]` in fp32, as the format defines them."""
    name, storage = rows.ggml_format, STORAGE[rows.ggml_format]
    stored = rows.data if rows.order is None else rows.data[rows.order]
    blocks = stored.unflatten(1, (-1, GGML_BLOCK_BYTES[name]))
    q = _integers(blocks, name).float().unflatten(-1, (-1, storage.group))  # [N, blocks, groups of a block, group]
    q -= 2 ** (storage.bits + storage.upper - 1) if storage.signed else 0
    factors = _factors(blocks, name).float()
    scale, offset = factors[..., :1], factors[..., 1:]
    if storage.scales == "super_scale":
        scale = scale * blocks[..., 192:208].contiguous().view(torch.int8)
    elif storage.scales == "super_offset":
        scales, offsets = _six_bits(blocks)
        scale, offset = scale * scales, -offset * offsets
    weight = scale[..., None] * q
    return (weight + offset[..., None] if storage.offset else weight).flatten(1)
