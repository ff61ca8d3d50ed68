"""Moves KV between slots: an accepted path comes to the front of its tree, in every layer at once.

Contract: as if all sources were read before any destination is written, so sources and destinations may overlap;
destinations are distinct.
"""

from __future__ import annotations

from torch import Tensor

from kernels.triton import in_use


def move_slots(stack: Tensor, source: Tensor, destination: Tensor) -> None:
    """stack `[L, 2, nkv, slots, D]`, contiguous; source and destination `[M]` slots."""
    if in_use(stack.device):
        from kernels.triton.move import MOST
        from kernels.triton.move import move_slots as in_place

        if len(source) <= MOST:
            return in_place(stack, source, destination)
    stack[:, :, :, destination] = stack[:, :, :, source]  # the right side is read whole before it is written
