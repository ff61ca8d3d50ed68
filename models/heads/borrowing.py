"""Heads that use the target's embedding and LM head in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kernels.quantise import WeightFormat
from models.heads.base import Head
from models.layers import Linear, PackedEmbedding
from models.targets.llama import LlamaTarget


class Borrowed:
    """The target's LM head and embedding: shared, never copied with the head."""

    def __init__(self, lm_head: Linear, embedding: Tensor | PackedEmbedding) -> None:
        self.lm_head, self.embedding = lm_head, embedding

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[..., H]` of tokens `[...]`."""
        stored = self.embedding
        return stored(ids) if isinstance(stored, PackedEmbedding) else F.embedding(ids, stored)

    def __deepcopy__(self, memo: dict[int, Any]) -> Borrowed:
        return self

    def apply(self, change: Callable[[Tensor], Tensor]) -> Borrowed:
        """Return it in the dtype or on the device that `change` sets; itself where that changes nothing."""
        if isinstance(self.embedding, PackedEmbedding):
            return self  # in blocks, it stays as it is
        embedding = change(self.embedding)
        if embedding is self.embedding:
            return self
        assert self.lm_head.packed is None, "a packed LM head stays as it is"
        tied = self.lm_head.weight is self.embedding
        lm_head = Linear(*reversed(self.lm_head.weight.shape), bias=False, device="meta")
        weight = embedding if tied else change(self.lm_head.weight)
        lm_head.weight = nn.Parameter(weight.detach(), requires_grad=False)
        return Borrowed(lm_head, lm_head.weight if tied else embedding)


class BorrowingHead(Head):
    """A head that computes logits with the target's LM head, and may read its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow_lm_head: Linear | None = None  # a copy of the borrowed LM head in fewer bits
        self._borrowed: Borrowed | None = None

    @property
    def reads_lm_head(self) -> bool:
        return True

    def lm_head_at(self, depth: int) -> nn.Module:
        return self.borrowed.lm_head if self.narrow_lm_head is None else self.narrow_lm_head

    @property
    def borrowed(self) -> Borrowed:
        assert self._borrowed is not None, "borrow() comes first"
        return self._borrowed

    def borrow(self, target: LlamaTarget) -> None:
        embedding = target.embed_tokens
        self._borrowed = Borrowed(
            target.lm_head, embedding if isinstance(embedding, PackedEmbedding) else embedding.weight
        )

    def pack(self, *, exact: bool, weight_format: WeightFormat) -> None:
        """Pack the linear layers and, for a format with fewer bits than the target's, a copy of its LM head.

        There is no copy if the head does not use it, or if it is split among processes or has fewer bits itself.
        """
        super().pack(exact=exact, weight_format=weight_format)
        lm_head = self.borrowed.lm_head
        if weight_format == "same" or type(lm_head) is not Linear or self.lm_head_at(0) is not lm_head:
            return
        if (weight := lm_head.unpacked_weight()) is not None:
            self.narrow_lm_head = Linear(*reversed(weight.shape), bias=False, device="meta")
            self.narrow_lm_head.weight = nn.Parameter(weight, requires_grad=False)
            self.narrow_lm_head.pack(exact=exact, weight_format=weight_format, quantise_rows=True)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def] # as nn.Module has it
        super()._apply(fn, recurse)
        if self._borrowed is not None:
            self._borrowed = self._borrowed.apply(fn)
        return self
