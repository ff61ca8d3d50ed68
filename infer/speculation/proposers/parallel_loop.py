"""Drafts with a parallel head, which has the logits of all depths after one forward and chooses from them in one call.

Medusa reads the target's state alone, P-EAGLE one mask slot per further depth, in rows that follow the committed ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from infer.speculation.draft_loop import Adjust, Chains, LogitsAt, TorchLoop, Unread, fused
from infer.speculation.early_exit import EarlyExit, HostExit
from infer.speculation.tree_shapes import Children, Run, TreeShape, grow
from kernels.choose import ChoiceParameters
from kernels.early_exit import Drafting
from kernels.rows import AttentionRows, repeated
from kernels.tree import Candidates
from models.attention import Attention
from models.heads.base import Head


class ParallelLoop(TorchLoop):
    def __init__(self, head: Head, attend: Callable[[AttentionRows], Attention] | None) -> None:
        super().__init__(head, attend)
        with torch.no_grad():
            self.mask_slot = head.mask_slot()

    def spare_rows(self, deepest: int) -> int:
        return 0 if self.mask_slot is None else deepest - 1

    def chain(
        self,
        unread: Unread,
        depths: Tensor,
        deepest: int,
        early_exit: EarlyExit | HostExit | None = None,
        adjust: Adjust | None = None,
    ) -> Chains:
        """As TorchLoop's. Without `adjust` a HostExit may decide: quicker where the host waits for the draft anyway."""
        if adjust is not None:
            assert not isinstance(early_exit, HostExit)
            return super().chain(unread, depths, deepest, early_exit, adjust)
        token, scores = self._chain(unread, deepest, scored=early_exit is not None)
        if early_exit is None or scores is None:
            return Chains(token, depths.clamp(max=deepest))
        if isinstance(early_exit, HostExit):
            return Chains(token, torch.tensor(early_exit.lengths(scores.tolist(), depths.tolist())), scores)
        chains = Drafting.begin(depths)
        for level in range(deepest):
            chains = early_exit(level, scores[:, level], chains, depths)
        return Chains(token, chains.length, scores)

    def tree(self, unread: Unread, shape: TreeShape, deepest: int) -> Candidates:
        fan_out = max(map(shape.fan_out, range(1, deepest + 1)))
        return grow(shape, deepest, unread.root, *self._children(unread, deepest, fan_out))

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

    def _children(self, unread: Unread, deepest: int, fan_out: int) -> tuple[Children, Run]:
        """All nodes of a level have the same children, at most `fan_out`, whatever was drafted before."""
        tokens, values = self._best_of_all(unread, deepest, fan_out)

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

    def _all_logits(self, unread: Unread, deepest: int) -> Tensor:
        """Return the head's logits `[B, deepest, Vd]`."""
        if self.mask_slot is None:
            return self._head.all_logits(self.read(unread), deepest)
        assert unread.rows is not None
        mask_id, mask_state = self.mask_slot
        spare = torch.arange(len(unread.ids), device=unread.ids.device) > repeated(unread.ends, unread.rows.counts)
        state = torch.where(spare[:, None], mask_state, fused(self._head, unread.features))
        states = self._step(unread.ids.masked_fill(spare, mask_id), state, unread.slots, unread.rows, 0)
        index = unread.ends[:, None] + torch.arange(deepest, device=unread.ids.device)
        return self._head.logits(states[index.flatten()], 0).unflatten(0, index.shape)  # all depths share one LM head
