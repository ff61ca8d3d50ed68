# pyright: reportCallIssue=false, reportArgumentType=false
"""Penalties, bias and masks in one pass over a row's logits: a program per row and block of the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.shape import Shaping

BLOCK = 2048


@triton.jit
def shape_kernel(
    logits, stride, size, prompt, output, drafted, depth, bias, allowed, words, out, repetition, presence, frequency,
    N: tl.constexpr, PENALISED: tl.constexpr, REPEATED: tl.constexpr, DRAFTED: tl.constexpr, BIASED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    inside = columns < size
    x = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if PENALISED:
        count = tl.load(output + columns, mask=inside, other=0.0)
        if DRAFTED:
            for index in range(depth):
                token = tl.load(drafted + row * depth + index)
                count += tl.where(columns == token, 1.0, 0.0)
        present = count > 0
        if REPEATED:
            repeated = present | (tl.load(prompt + columns, mask=inside, other=0) != 0)
            penalised = tl.where(x > 0, tl.div_rn(x, tl.full([N], 1.0, tl.float32) * repetition), x * repetition)
            x = tl.where(repeated, penalised, x)
        x = x - frequency * count
        x = x - tl.where(present, presence, 0.0)
    if BIASED:
        x = x + tl.load(bias + columns, mask=inside, other=0.0)
    if MASKED:
        word = tl.load(allowed + row * words + columns // 32, mask=inside, other=0)
        x = tl.where((word >> (columns % 32)) & 1 != 0, x, float("-inf"))
    tl.store(out + row * size + columns, x, mask=inside)


def shape(logits: Tensor, shaping: Shaping) -> Tensor:
    """As kernels.shape.shape."""
    rows, size = logits.shape
    assert logits.stride(1) == 1, "columns beside each other"
    assert shaping.allowed is None or shaping.allowed.is_contiguous()
    out = torch.empty(rows, size, device=logits.device)
    s, drafted = shaping, shaping.drafted
    if drafted is not None and not drafted.shape[1]:
        drafted = None
    shape_kernel[rows, triton.cdiv(size, BLOCK)](
        logits, logits.stride(0), size, s.prompt, s.output, drafted, 0 if drafted is None else drafted.shape[1], s.bias,
        s.allowed, 0 if s.allowed is None else s.allowed.shape[1], out,
        float(s.repetition), float(s.presence), float(s.frequency),
        N=BLOCK, PENALISED=s.penalises, REPEATED=s.repetition != 1, DRAFTED=drafted is not None,
        BIASED=s.bias is not None, MASKED=s.allowed is not None, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out
