"""The kinds of heads: what training, engine and checkpoints require of each of them.

Slot i holds token t[i+1] and the target's hidden states at position i; depth d is the d-th token drafted from it,
t[i+2+d]. A recurrent head computes the state of a depth from the previous depth's state and token. A mask head needs
neither, so one forward computes every depth. A block drafter (block.py) has a forward for the context and one for the
rows of a block. Heads are independent of batches, caches and losses; what is done with their weights outside of a
forward are functions of weights.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.draft import DraftParts
from models.attention import Attention
from models.vocab import target_ids


class Readout(NamedTuple):
    """What computes the logits of a depth from its state: `lm_head(before(state))`."""

    lm_head: nn.Module  # [..., S] -> [..., Vd]
    before: Callable[[Tensor], Tensor] = nn.Identity()


class Head(nn.Module, ABC):
    """A draft head, of one of the kinds below. Its parameters with `requires_grad` are trained.

    A head whose draft vocabulary is smaller than the target's maps it by its buffers `d2t` and `t2d`, or `token_map`
    (models/vocab.py).
    """

    config: Any  # its HeadShape
    notes: Sequence[str] = ()  # on the files that it was read from: what was assumed, and what nothing reads

    @property
    def target_ids(self) -> Tensor:
        """int64 `[Vd]`: the target id of every draft id, ascending."""
        maps = dict(self.named_buffers(recurse=False))
        if "d2t" in maps:
            return target_ids(maps["d2t"])
        if "token_map" in maps:
            return maps["token_map"]
        return torch.arange(self.config.vocab_size, device=next(self.parameters()).device)

    @abstractmethod
    def fuse(self, aux: Sequence[Tensor]) -> Tensor:
        """Fuse the target's features, one `[..., Ht]` per aux layer, into the state `[..., S]` that depth 0 reads."""

    @abstractmethod
    def readout(self, depth: int) -> Readout:
        """Return what computes this depth's logits, before they are corrected."""

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Return the logits `[..., Vd]` of a state `[..., S']` of this depth."""
        lm_head, before = self.readout(depth)
        return lm_head(before(state))


class RecurrentHead(Head):
    """A head that computes the state of a depth from the state and the token of the depth before."""

    keeps_rows: bool = False  # whether `step` returns the states of the rows alone whose outputs its attention returns

    @abstractmethod
    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        """Compute the state of `depth`, `[..., S']`, from ids and positions `[...]` and state `[..., S]`.

        Depth 0 takes the fused state and token t[i+1] at rotary position i, depth d the state of depth d - 1 and the
        token drafted there, at position i + d.
        """

    def draft_parts(self) -> DraftParts | None:
        """Return the weights for kernels that run whole draft levels, once packed; None where none runs its layers."""
        return None


class MaskHead(Head):
    """A head whose depths need no drafted token: all are computed in one forward.

    Either the slot's row alone yields every depth, or a row per further depth follows it, filled with `mask_slot`.
    """

    @abstractmethod
    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        """As of a recurrent head, but that depths past 0 take what `mask_slot` returns in place of token and state."""

    def mask_slot(self) -> tuple[int, Tensor] | None:
        """Return token id and state `[S]` of the rows past depth 0; None if the slot's row yields all depths."""
        return None

    def all_logits(self, state: Tensor, depths: int) -> Tensor:
        """Return the logits at depths 0 to `depths` - 1 of one state, `[R, S]` -> `[R, depths, Vd]`."""
        return torch.stack([self.logits(state, depth) for depth in range(depths)], dim=1)
