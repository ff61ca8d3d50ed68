"""LM head weights as the fused loss kernel reads them: one matrix, in autocast's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers import Linear


class NarrowWeights:
    """A cache of weights in autocast's dtype: of a trained weight for one forward, of a frozen one until it changes.

    The version counter is no use for trained weights: fused optimisers change a parameter without incrementing it.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[tuple[object, ...], Tensor]] = {}
        self._trained: set[int] = set()

    def renew(self) -> None:
        """Drop the copies of trained weights. Call it whenever parameters may have changed."""
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
    """Return whether the LM head is a plain product with one unpacked matrix, without bias."""
    return type(lm_head) is Linear and lm_head.packed is None and lm_head.bias is None
