"""Drafts with a block drafter: one forward over the block of every request gives the LM head's logits of all depths.

Without a corrector all depths are chosen from in one call. A corrector walks over the best candidates of every depth
(kernels/walk.py), in one call for a chain and one per level of a tree, unless it carries a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infer.speculation.draft_loop import LogitsAt, Unread, fused
from infer.speculation.proposers.parallel_loop import ParallelLoop
from infer.speculation.tree import MAX_NODES
from infer.speculation.tree_shapes import Children, Run
from kernels.rows import AttentionRows
from kernels.tree import Picked
from kernels.walk import Lattice, make_lattice, rank_candidates, walk_chain
from models.attention import Attention, WriteKeys
from models.heads.block import BlockHead


class BlockLoop(ParallelLoop):
    """A slot of the context lies at its place like a recurrent head's, the block's rows at the places after the root's.

    These keep no KV: the context that is read next overwrites it. `write` stores the keys and values of rows in the
    head's KV layers, where `attend` makes their attention. `candidates`: of a depth, that a corrector chooses among
    where the head does not say how many.
    """

    _head: BlockHead

    def __init__(
        self,
        head: BlockHead,
        attend: Callable[[AttentionRows], Attention],
        write: Callable[[AttentionRows], WriteKeys],
        candidates: int,
    ) -> None:
        super().__init__(head, attend)
        self._write, self.candidates = write, candidates

    def read(self, unread: Unread) -> Tensor:
        """Write the context of the unread rows; return their fused features `[R, S]`."""
        assert unread.rows is not None
        state = fused(self._head, unread.features)
        self._head.write_context(state, unread.slots, self._write(unread.rows))
        return state

    def _logits(self, unread: Unread, positions: Tensor) -> LogitsAt:
        """All tokens are corrected, not only candidates, since what adjusts the logits may rule candidates out."""
        head, (states, base) = self._head, self._run_block(unread, len(positions))
        anchors, carried = unread.ids[unread.ends], head.begin_walk(states[:, 0])

        def logits_at(level: int, drafted: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
            nonlocal carried
            before = drafted[-1] if drafted else anchors
            state, carried = head.slot_state(states[:, level], before, carried)
            confidence = head.confidence(state) if head.predicts_acceptance else None
            return head.corrected(base[:, level], state), confidence

        return logits_at

    def _all_logits(self, unread: Unread, deepest: int) -> Tensor:
        return self._run_block(unread, deepest)[1]

    def _chain(self, unread: Unread, deepest: int, *, scored: bool) -> tuple[Tensor, Tensor | None]:
        head = self._head
        if not head.corrects:
            return super()._chain(unread, deepest, scored=scored)
        (states, base), anchors = self._run_block(unread, deepest), unread.ids[unread.ends]
        lattice, transition = self._lattice(unread, base), head.transition(states)
        if transition.predecessor is not None:
            tokens, values = walk_chain(lattice, transition, anchors, unread.parameters, unread.root)
        else:
            carried, drafted, scores = head.begin_walk(states[:, 0]), [anchors], list[Tensor]()
            for slot in range(deepest):
                state, carried = head.slot_state(states[:, slot], drafted[-1], carried)
                query, position = head.query(state)[:, None], unread.root + slot
                token, value = rank_candidates(lattice, slot, transition, query, unread.parameters, position, 1)
                drafted.append(token[:, 0, 0])
                scores.append(value[:, 0, 0])
            tokens, values = torch.stack(drafted[1:], dim=1), torch.stack(scores, dim=1)
        if not (scored and head.predicts_acceptance):
            return tokens, values
        before = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
        return tokens, head.confidence(head.slot_state(states, before, head.begin_walk(states))[0])

    def _children(self, unread: Unread, deepest: int, fan_out: int) -> tuple[Children, Run]:
        """With a corrector each node has its own children, from the candidates of its depth and its token."""
        head = self._head
        if not head.corrects:
            return super()._children(unread, deepest, fan_out)
        states, base = self._run_block(unread, deepest)
        lattice, transition = self._lattice(unread, base), head.transition(states)
        before, carried = unread.ids[unread.ends][:, None], head.begin_walk(states[:, :1])  # [B, M], [B, M, C]

        def children(level: int, fan_out: int) -> tuple[Tensor, Tensor]:
            nonlocal carried
            slot = level - 1
            if transition.predecessor is not None:
                query = transition.query(slot, before)
            else:
                rows = states[:, slot, None].expand(-1, before.shape[1], -1)
                state, carried = head.slot_state(rows, before, carried)
                query = head.query(state)
            position = unread.root + slot
            return rank_candidates(lattice, slot, transition, query, unread.parameters, position, fan_out)

        def run(level: int, picked: Picked) -> None:
            nonlocal before, carried
            before = picked.token
            if carried.shape[-1]:
                carried = carried.gather(1, picked.parent[..., None].expand(-1, -1, carried.shape[-1]).long())

        return children, run

    def _lattice(self, unread: Unread, base: Tensor) -> Lattice:
        count = self._head.num_candidates or self.candidates
        return make_lattice(base, unread.parameters, unread.root, self.draft_ids, count)

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
