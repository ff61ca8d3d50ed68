"""Logits processors before the temperature: penalties, bias and masks on the logits of one request's rows, in one pass.

Contract: a row's logits depend on its own prefix alone, so a drafted token counts only for rows whose path contains it;
fp32, each operation rounded by itself, with the same bits in every implementation. A forbidden column is -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.operands import WORD, Shaping

FORBIDDEN = float("-inf")


def shape(logits: Tensor, shaping: Shaping) -> Tensor:
    """Apply `shaping` to logits `[n, V]` -> `[n, V]`, fp32 in new memory."""
    if uses_triton(logits.device):
        from kernels.triton.shape import shape as fused

        return fused(logits, shaping)
    return shape_in_torch(logits, shaping)


def shape_in_torch(logits: Tensor, shaping: Shaping) -> Tensor:
    """The same as `shape` in plain torch: the reference for the kernel."""
    out = logits.float().clone()
    if shaping.penalizes:
        out = penalize(out, shaping)
    if shaping.bias is not None:
        out += shaping.bias
    if shaping.allowed is not None:
        out.masked_fill_(~unpacked(shaping.allowed, logits.shape[1]), FORBIDDEN)
    return out


def penalize(logits: Tensor, shaping: Shaping) -> Tensor:
    assert shaping.output is not None
    output = shaping.output.repeat(len(logits), 1)  # [n, V]
    if shaping.drafted is not None:
        valid = (shaping.drafted >= 0).float()
        output.scatter_add_(1, shaping.drafted.clamp(min=0), valid)
    present = output > 0
    if shaping.repetition != 1:
        assert shaping.prompt is not None
        penalized = torch.where(logits > 0, logits / shaping.repetition, logits * shaping.repetition)
        logits = torch.where(present | shaping.prompt, penalized, logits)
    return logits - shaping.frequency * output - shaping.presence * present


def unpacked(words: Tensor, columns: int) -> Tensor:
    """Unpack words `[..., W]` int32 -> bool `[..., columns]`."""
    bits = (words[..., None] >> torch.arange(WORD, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(-2)[..., :columns].bool()


def packed(allowed: Tensor) -> Tensor:
    """Pack bool `[..., V]` -> int32 words `[..., ceil(V / 32)]`; bits past V are 0."""
    padding = -allowed.shape[-1] % WORD
    bits = torch.nn.functional.pad(allowed, (0, padding)).unflatten(-1, (-1, WORD)).long()
    words = (bits << torch.arange(WORD, device=allowed.device)).sum(-1)
    return (words - ((words >> (WORD - 1)) << WORD)).int()  # the highest bit is the sign
