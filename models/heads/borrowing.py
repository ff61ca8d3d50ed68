"""The target's embedding and LM head, which some heads use in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kernels.weights.quantize import WeightFormat
from models.layers import Linear, PackedEmbedding, make_lm_head
from models.targets.llama import LlamaTarget


class DividedLinear(Linear):
    """A target's LM head whose logits are divided, as the target's are."""

    def __init__(self, base: Linear, divisor: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.base, self.divisor = base, divisor

    def forward(self, input: Tensor) -> Tensor:
        return self.base(input) / self.divisor


class Borrowed(nn.Module):
    """What a head uses of its target, once `borrow` was called: shared, never copied, nor among its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow_lm_head: Linear | None = None  # a copy of the LM head in fewer bits
        self.lent: tuple[Linear, Tensor | PackedEmbedding] | None = None  # the target's LM head and embedding
        self.divisor = 1.0  # of the target's logits
        self._divided: tuple[DividedLinear, ...] = ()  # in a tuple, so that it is none of our modules

    @property
    def lm_head(self) -> Linear:
        plain = self._plain
        if self.divisor == 1:
            return plain
        if not self._divided or self._divided[0].base is not plain:
            self._divided = (DividedLinear(plain, self.divisor),)
        return self._divided[0]

    @property
    def _plain(self) -> Linear:
        assert self.lent is not None, "borrow() comes first"
        return self.lent[0] if self.narrow_lm_head is None else self.narrow_lm_head

    @property
    def embedding(self) -> Tensor | PackedEmbedding:
        assert self.lent is not None, "borrow() comes first"
        return self.lent[1]

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[..., H]` of tokens `[...]`."""
        stored = self.embedding
        return stored(ids) if isinstance(stored, PackedEmbedding) else F.embedding(ids, stored)

    def pack(self, *, exact: bool, weight_format: WeightFormat) -> None:
        """Pack a copy of the LM head in a format of fewer bits than the target's, or of one that was made for heads.

        There is no copy if the LM head is split among processes or has fewer bits itself.
        """
        lm_head = self._plain
        served = weight_format == "same" and lm_head.packed is not None
        if served or type(lm_head) is not Linear or (weight := lm_head.unpacked_weight()) is None:
            return
        narrow = make_lm_head(*reversed(weight.shape), device="meta")
        narrow.weight = nn.Parameter(weight, requires_grad=False)
        narrow.pack(exact=exact, weight_format=weight_format, quantize_rows=True)
        self.narrow_lm_head = narrow

    def __deepcopy__(self, memo: dict[int, Any]) -> Borrowed:
        copy = Borrowed()
        copy.lent, copy.divisor = self.lent, self.divisor
        return copy

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def] # as nn.Module has it
        """Change dtype or device of what is borrowed too, unless it is packed or in blocks."""
        super()._apply(fn, recurse)
        if self.lent is None or isinstance(self.lent[1], PackedEmbedding):
            return self
        (lm_head, embedding), changed = self.lent, fn(self.lent[1])
        if changed is not embedding:
            assert lm_head.packed is None, "a packed LM head stays as it is"
            weight = changed if lm_head.weight is embedding else fn(lm_head.weight)
            other = make_lm_head(*reversed(lm_head.weight.shape), device="meta")
            other.weight = nn.Parameter(weight.detach(), requires_grad=False)
            self.lent = other, other.weight if lm_head.weight is embedding else changed
        return self


def borrowed_by(head: nn.Module) -> Iterator[Borrowed]:
    """Yield what the head uses of its target; nothing if all modules are its own."""
    return (module for module in head.modules() if isinstance(module, Borrowed))


def borrow(head: nn.Module, target: LlamaTarget) -> None:
    """Let the head use the target's modules, where it uses any. Call before the first step.

    What is made of them is kept, as nothing can be made of a target that was rounded since.
    """
    for borrowed in borrowed_by(head):
        if borrowed.lent is None or target.config.embedding_size is None:
            borrowed.lent, borrowed.divisor = target.lend(), target.config.logits_scaling
