# pyright: reportCallIssue=false, reportArgumentType=false
"""Moves KV between slots in place: a program handles a few columns of all moved slots, of one layer's keys or values.

It reads them all, synchronises its threads, and writes them all; programs share no element.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 16  # 32 bytes of bf16: the least that one memory access transfers
FEW, MOST = 16, 256  # slots that a program holds in registers


@triton.jit(do_not_specialize=["count", "slots"])
def move_kernel(stack, source, destination, count, slots, D: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    base = stack + tl.program_id(0).to(tl.int64) * slots * D
    i, d = tl.arange(0, COUNT), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    moved = i < count
    mask = moved[:, None] & (d < D)[None, :]
    origin, target = tl.load(source + i, mask=moved, other=0), tl.load(destination + i, mask=moved, other=0)
    values = tl.load(base + origin[:, None] * D + d[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(base + target[:, None] * D + d[None, :], values, mask=mask)


def move_slots(stack: Tensor, source: Tensor, destination: Tensor) -> None:
    """As kernels.copies.move_slots, for at most MOST slots, int64."""
    assert stack.is_contiguous()
    assert len(source) <= MOST
    slots, dim = stack.shape[-2:]
    grid = (stack[..., 0, 0].numel(), triton.cdiv(dim, COLUMNS))
    count = len(source)
    padded = FEW if count <= FEW else MOST  # not a kernel for each power of two, compiled while serving
    move_kernel[grid](
        stack, source.contiguous(), destination.contiguous(), count, slots, D=dim, COUNT=padded, COLUMNS=COLUMNS
    )
