"""Memory for the slots of a KV cache, in runs of pages, so that what no token was written to takes none.

On a GPU all slots of a layer's head lie beside each other. On a CPU those of RUN pages do, and then come the same pages
of its other heads and layers: a few tokens take a few huge pages of memory, instead of one or more of each head. Slots
are counted as one head's memory has them, so there are many between the last of a run and the first of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention import LayerShape
from kernels.cpu.memory import zeros
from kernels.dispatch import uses_triton

RUN = 128  # pages: in shorter runs the hardware fetches ahead less, and a long context is read slower


class SlotRuns:
    """Slots of `pages` pages, the null block's included, counted for stacks of layers, given by number and shape.

    `page_ids`: of all pages but the null block, so that a slot is page * page_size + offset. Ranks have the same if
    they are counted for the layers that all have: the target's.
    """

    def __init__(
        self, stacks: Sequence[tuple[int, LayerShape]], pages: int, page_size: int, device: torch.device
    ) -> None:
        in_runs = device.type == "cpu" and not uses_triton(device)
        self._run, self._page_size, self._device = min(RUN, pages) if in_runs else pages, page_size, device
        self._runs, self._heads = -(-pages // self._run), max(heads_of(*stack) for stack in stacks)
        starts = (run * self._heads * self._run for run in range(self._runs))
        self.page_ids = [start + page for start in starts for page in range(self._run)][1:pages]

    def zeros(self, layers: int, shape: LayerShape, dtype: torch.dtype) -> Tensor:
        """Return `[layers, 2, kv_heads, slots, D]`, not contiguous if there are several runs."""
        slots, dim = self._run * self._page_size, shape.head_dim
        sizes = layers, shape.vectors, shape.kv_heads, ((self._runs - 1) * self._heads + 1) * slots, dim
        if self._device.type != "cpu":
            return torch.zeros(sizes, dtype=dtype, device=self._device)
        heads, head = heads_of(layers, shape), slots * dim
        if self._runs > 1 and heads > self._heads:  # a drafter's layer that has no room between runs
            return zeros(sizes, dtype, huge=False)
        between, huge = (self._heads, 2 * heads > self._heads) if self._runs > 1 else (heads, True)
        memory = zeros((self._runs, between, head), dtype, huge=huge)
        return memory.as_strided(sizes, (shape.vectors * shape.kv_heads * head, shape.kv_heads * head, head, dim, 1))


def heads_of(layers: int, shape: LayerShape) -> int:
    """Return how many vectors these layers keep of a token."""
    return layers * shape.vectors * shape.kv_heads
