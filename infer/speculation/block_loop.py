"""Drafts with a block drafter: one forward over the block of every request gives the logits of all depths."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from infer.speculation.draft_loop import TorchLoop, Unread, fused
from infer.speculation.tree import MAX_NODES
from kernels.rows import AttentionRows
from models.attention import Attention, WriteKeys
from models.heads.block import BlockHead


class BlockLoop(TorchLoop):
    """A slot of the context lies at its place like a recurrent head's, the block's rows at the places after the root's.

    These keep no KV: the context that is read next overwrites it. `write` stores the keys and values of rows in the
    head's KV layers, where `attend` makes their attention.
    """

    _head: BlockHead

    def __init__(
        self,
        head: BlockHead,
        attend: Callable[[AttentionRows], Attention],
        write: Callable[[AttentionRows], WriteKeys],
    ) -> None:
        super().__init__(head, attend)
        self._attend_rows, self._write = attend, write

    def read(self, unread: Unread) -> Tensor:
        """Write the context of the unread rows; return their fused features `[R, S]`."""
        assert unread.rows is not None
        state = fused(self._head, unread.features)
        self._head.write_context(state, unread.slots, self._write(unread.rows))
        return state

    def _all_logits(self, unread: Unread, deepest: int) -> Tensor:
        self.read(unread)
        head, first = self._head, self._head.first_row
        states = self._block_states(unread, head.block_rows(deepest))[:, first : first + deepest]
        return head.logits(states.flatten(0, 1), 0).unflatten(0, states.shape[:2])

    def _block_states(self, unread: Unread, rows: int) -> Tensor:
        """Run a block of `rows` rows per request; return their states `[B, rows, S]`."""
        row = torch.arange(rows, device=unread.root.device)
        positions = self._head.block_positions(unread.root, rows)
        ids = self._head.block_ids(unread.ids[unread.ends], rows)

        def attend(causal: bool) -> Attention:
            bits = torch.full((len(ids), rows), -1 if rows == MAX_NODES else (1 << rows) - 1, device=row.device)
            addressed = self._after_root(unread, row, None if causal else bits)
            assert addressed is not None
            return self._attend_rows(addressed)

        return self._head.block_states(ids.flatten(), positions.flatten(), attend).unflatten(0, ids.shape)
