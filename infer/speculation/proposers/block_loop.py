"""Drafts with a block drafter: one forward over the block of every request gives the logits of all depths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infer.speculation.draft_loop import LogitsAt, TorchLoop, Unread, fused, positions_from
from infer.speculation.tree import MAX_NODES
from infer.speculation.tree_shapes import Children, Run
from kernels.rows import AttentionRows
from kernels.tree import Picked
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
        self._write = write

    def read(self, unread: Unread) -> Tensor:
        """Write the context of the unread rows; return their fused features `[R, S]`."""
        assert unread.rows is not None
        state = fused(self._head, unread.features)
        self._head.write_context(state, unread.slots, self._write(unread.rows))
        return state

    def _parallel(self, unread: Unread, deepest: int) -> LogitsAt:
        head, (states, base) = self._head, self._run_block(unread, deepest)
        anchors, carried = unread.ids[unread.ends], head.begin_walk(states[:, 0])

        def logits_at(level: int, drafted: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
            nonlocal carried
            before = drafted[-1] if drafted else anchors
            state, carried = head.slot_state(states[:, level], before, carried)
            return head.corrected(base[:, level], state), head.confidence(state)

        return logits_at

    def _growing_parallel(self, unread: Unread, deepest: int) -> tuple[Children, Run]:
        """With a corrector each node has its own children, from the logits of its depth and its token."""
        head, (states, base) = self._head, self._run_block(unread, deepest)
        if not head.corrects:
            return self._shared_children(unread, base)
        before, carried = unread.ids[unread.ends][:, None], head.begin_walk(states[:, :1])  # [B, M], [B, M, C]
        positions = positions_from(unread.root, deepest)

        def children(level: int, fan_out: int) -> tuple[Tensor, Tensor]:
            nonlocal carried
            width = before.shape[1]
            state, carried = head.slot_state(states[:, level - 1, None].expand(-1, width, -1), before, carried)
            logits = head.corrected(base[:, level - 1, None].expand(-1, width, -1), state)
            return self._best_of_nodes(logits, positions[level - 1], unread.parameters, fan_out)

        def run(level: int, picked: Picked) -> None:
            nonlocal before, carried
            parent = picked.parent[..., None].expand(-1, -1, carried.shape[-1])
            before, carried = picked.token, carried.gather(1, parent.long())

        return children, run

    def _run_block(self, unread: Unread, deepest: int) -> tuple[Tensor, Tensor]:
        """Return the states `[B, deepest, S]` of every depth's row, and the LM head's logits `[B, deepest, Vd]`."""
        self.read(unread)
        head, first = self._head, self._head.first_row
        states = self._block_states(unread, head.block_rows(deepest))[:, first : first + deepest]
        return states, head.base_logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])

    def _block_states(self, unread: Unread, rows: int) -> Tensor:
        """Run a block of `rows` rows per request; return their states `[B, rows, S]`."""
        positions = self._head.block_positions(unread.root, rows)
        ids = self._head.block_ids(unread.ids[unread.ends], rows)

        def attend(causal: bool) -> Attention:
            bits = torch.full((len(ids), rows), -1 if rows == MAX_NODES else (1 << rows) - 1, device=ids.device)
            addressed = self._past(unread, unread.root - unread.base, rows, shift=1, tree_mask=None if causal else bits)
            assert addressed is not None
            assert self._attend is not None
            return self._attend(addressed)

        states = self._head.block_states(ids.flatten(), positions.flatten(), attend, rows)
        return states.unflatten(0, ids.shape)
