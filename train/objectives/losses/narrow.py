"""LM heads as a kernel for a whole loss reads them: one matrix, in the dtype of products under autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers import Linear


class NarrowWeights:
    """Copies of weights in autocast's dtype: of a trained one for one forward, of a frozen one for as long as it stays.

    A trained one's version does not tell: fused optimisers change a parameter and leave its counter as it was.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[tuple[object, ...], Tensor]] = {}
        self._trained: set[int] = set()

    def renew(self) -> None:
        """To be called when parameters may have changed."""
        for key in self._trained:
            del self._copies[key]
        self._trained.clear()

    def __call__(self, weight: Tensor) -> Tensor:
        kind = weight.device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if cast else weight.dtype
        if dtype == weight.dtype:
            return weight.detach()
        key = weight.data_ptr(), weight._version, weight.shape, dtype
        before, copy = self._copies.get(id(weight), (None, None))
        if copy is None or before != key:
            copy = weight.detach().to(dtype)
            self._copies[id(weight)] = key, copy
            if weight.requires_grad:
                self._trained.add(id(weight))
        return copy


def is_plain(lm_head: nn.Module) -> bool:
    """A product with one whole matrix, and no more."""
    return type(lm_head) is Linear and lm_head.packed is None and lm_head.bias is None
