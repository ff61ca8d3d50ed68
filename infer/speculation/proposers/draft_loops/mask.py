"""Drafts with a mask head, which has the logits of all depths after one forward and chooses from them in one call.

Medusa reads the target's state alone, P-EAGLE one mask slot per further depth, in rows that follow the committed ones.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from infer.speculation.proposers.draft_loops.base import Chains, DraftLoop, LogitsAt, Unread, last_states
from infer.speculation.proposers.draft_loops.early_exit import EarlyExit
from infer.speculation.proposers.draft_loops.tree_shapes import Children, Run, TreeShape
from kernels.operands import ChoiceParameters
from kernels.rows import repeated
from models.heads.base import MaskHead


class OneForwardLoop(DraftLoop):
    """What mask heads and block drafters share."""

    one_forward = True

    def _all_levels(self, unread: Unread, depths: Tensor, deepest: int, early_exit: EarlyExit | None) -> Chains:
        token, scores = self._chain(unread, deepest, scored=early_exit is not None)
        if early_exit is None or scores is None:
            return Chains(token, depths.clamp(max=deepest))
        early_exit.after_all(scores)
        return Chains(token, early_exit.lengths, scores)

    def _logits(self, unread: Unread, positions: Tensor) -> LogitsAt:
        logits = self._all_logits(unread, len(positions))
        return lambda level, _: (logits[:, level], None)

    def _chain(self, unread: Unread, deepest: int, *, scored: bool) -> tuple[Tensor, Tensor | None]:
        """Return the tokens of all depths, `[B, deepest]`, and if `scored` their log-probabilities."""
        if scored:
            tokens, values = self._best_of_all(unread, deepest, 1)
            return tokens[..., 0], values[..., 0]
        logits, positions, parameters = self._rows_of_all(unread, deepest)
        return self.choice(logits, positions, parameters).unflatten(0, (-1, deepest)), None

    def _growing(self, unread: Unread, shape: TreeShape, deepest: int) -> tuple[Children, Run]:
        """All nodes of a level have the same children, whatever was drafted before."""
        tokens, values = self._best_of_all(unread, deepest, max(map(shape.fan_out, range(1, deepest + 1))))

        def children(level: int, count: int) -> tuple[Tensor, Tensor]:
            of_level = (part[:, level - 1, None, :count] for part in (tokens, values))
            token, value = (part.clone() for part in of_level)  # Triton compiles for addresses at multiples of 16 bytes
            return token, value

        return children, lambda level, picked: None

    def _best_of_all(self, unread: Unread, deepest: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` best tokens of all depths and their log-probabilities, `[B, deepest, count]` each."""
        tokens, values = self.best(*self._rows_of_all(unread, deepest), count)
        return tokens.unflatten(0, (-1, deepest)), values.unflatten(0, (-1, deepest))

    def _rows_of_all(self, unread: Unread, deepest: int) -> tuple[Tensor, Tensor, ChoiceParameters | None]:
        """Return logits, positions and parameters of all depths of each request in turn, `B * deepest` rows."""
        positions = unread.root[:, None] + torch.arange(deepest, device=unread.root.device)
        parameters = unread.parameters and unread.parameters.repeated(deepest)
        return self._all_logits(unread, deepest).flatten(0, 1), positions.flatten(), parameters

    @abstractmethod
    def _all_logits(self, unread: Unread, deepest: int) -> Tensor:
        """Return the head's logits `[B, deepest, Vd]`."""


class MaskLoop(OneForwardLoop):
    _head: MaskHead

    def __init__(self, head: MaskHead) -> None:
        super().__init__(head)
        with torch.no_grad():
            self.mask_slot = head.mask_slot()

    @torch.no_grad()
    def refresh(self) -> None:
        if self.mask_slot is not None and (mask_slot := self._head.mask_slot()) is not None:
            self.mask_slot[1].copy_(mask_slot[1])

    def spare_rows(self, deepest: int) -> int:
        return 0 if self.mask_slot is None else deepest - 1

    def places(self, depth: int, shape: TreeShape | None) -> int:
        return depth - 1

    def read(self, unread: Unread) -> None:
        last_states(self, self._head, unread)

    def _all_logits(self, unread: Unread, deepest: int) -> Tensor:
        if self.mask_slot is None:
            return self._head.all_logits(last_states(self, self._head, unread), deepest)
        assert unread.rows is not None
        mask_id, mask_state = self.mask_slot
        spare = torch.arange(len(unread.ids), device=unread.ids.device) > repeated(unread.ends, unread.rows.counts)
        state, ids = torch.where(spare[:, None], mask_state, self.fused(unread.features)), unread.ids
        attention = self.attention(unread.rows)
        states = self._head.step(ids.masked_fill(spare, mask_id), state, unread.slots, attention, 0)
        index = unread.ends[:, None] + torch.arange(deepest, device=ids.device)
        return self._head.logits(states[index.flatten()], 0).unflatten(0, index.shape)  # all depths share one LM head
