"""The interface that a recurrent layer calls, and its implementation for training, without states of requests.

A layer hands over the inputs of its convolution and its recurrence; whoever implements `Recurrence` decides which rows
follow each other, and where the states before them come from (kernels/recurrence.py; in the engine infer/kvcache/).
The engine's and training's attention are of one object with it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.recurrence import convolve, scan
from kernels.recurrent_rows import RecurrentRows


class Recurrence(Protocol):
    """`layer` counts recurrent layers alone. Shapes as in kernels/recurrence.py, with `[...]` in place of `[R]`."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor: ...

    def scan(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor, *, delta: bool
    ) -> Tensor: ...


class CausalRecurrence:
    """Every slot of `[B, T]` follows the slot before it in its own document. Stateless.

    starts `[B, T]`: the first slot of each slot's document; None: each row is one document.
    """

    _rows: RecurrentRows | None = None

    def __init__(self, starts: Tensor | None = None) -> None:
        self.starts = starts

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
        rows = self._documents(x)
        return convolve(x.flatten(0, 1), weight, bias, None, rows, silu=silu).view(x.shape)

    def scan(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor, *, delta: bool) -> Tensor:
        rows = self._documents(v)
        q, k, flat, decay, gain = (x.flatten(0, 1) for x in (q, k, v, decay, gain))
        return scan(q, k, flat, decay, gain, None, rows, delta=delta).view(v.shape)

    def _documents(self, x: Tensor) -> RecurrentRows:
        if self._rows is None:
            size, length = x.shape[:2]
            counts = [length] * size
            if self.starts is not None:
                row = torch.arange(length, device=x.device) == self.starts
                begins = torch.nonzero(row.flatten()).flatten().tolist()
                counts = [end - begin for begin, end in zip(begins, [*begins[1:], size * length], strict=True)]
            self._rows = RecurrentRows.chains(counts, None, x.device)
        return self._rows
