# pyright: reportCallIssue=false, reportArgumentType=false
"""Penalties, bias and masks in one pass over a row's logits: a program per row and block of the vocabulary.

Which of them a request asks for is an argument, not a constant: one kernel is compiled for all requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import WORD, Shaping

BLOCK = 2048
PENALIZED, REPEATED, BIASED, MASKED = (tl.constexpr(1 << bit) for bit in range(4))  # of `uses`


@triton.jit(do_not_specialize=["uses", "depth"])
def shape_kernel(
    logits, stride, size, prompt, output, drafted, bias, allowed, words, out, uses, depth,
    repetition, presence, frequency, N: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    inside = columns < size
    x = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if uses & PENALIZED != 0:
        count = tl.load(output + columns, mask=inside, other=0.0)
        for index in range(depth):
            token = tl.load(drafted + row * depth + index)
            count += tl.where(columns == token, 1.0, 0.0)
        present = count > 0
        if uses & REPEATED != 0:
            repeated = present | (tl.load(prompt + columns, mask=inside, other=0) != 0)
            penalized = tl.where(x > 0, tl.div_rn(x, tl.full([N], 1.0, tl.float32) * repetition), x * repetition)
            x = tl.where(repeated, penalized, x)
        x = x - frequency * count
        x = x - tl.where(present, presence, 0.0)
    if uses & BIASED != 0:
        x = x + tl.load(bias + columns, mask=inside, other=0.0)
    if uses & MASKED != 0:
        word = tl.load(allowed + row * words + columns // 32, mask=inside, other=0)
        x = tl.where((word >> (columns % 32)) & 1 != 0, x, float("-inf"))
    tl.store(out + row * size + columns, x, mask=inside)


def shape(logits: Tensor, shaping: Shaping) -> Tensor:
    """As kernels.shape.shape."""
    rows, size = logits.shape
    assert logits.stride(1) == 1, "columns beside each other"
    assert shaping.allowed is None or shaping.allowed.is_contiguous()
    out, s = torch.empty(rows, size, device=logits.device), shaping
    used = (s.penalizes, s.repetition != 1, s.bias is not None, s.allowed is not None)

    def given(field: Tensor | None, dtype: torch.dtype) -> Tensor:
        return torch.empty(1, dtype=dtype, device=logits.device) if field is None else field

    shape_kernel[rows, triton.cdiv(size, BLOCK)](
        logits, logits.stride(0), size, given(s.prompt, torch.bool), given(s.output, torch.float32),
        given(s.drafted, torch.int64), given(s.bias, torch.float32), given(s.allowed, torch.int32),
        triton.cdiv(size, WORD), out, sum(use << bit for bit, use in enumerate(used)),
        0 if s.drafted is None else s.drafted.shape[1],
        float(s.repetition), float(s.presence), float(s.frequency), N=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out
