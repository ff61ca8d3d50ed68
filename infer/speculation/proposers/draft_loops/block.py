"""Drafts with a block drafter: one forward over the block of every request gives the LM head's logits of all depths.

Without a corrector all depths are chosen from in one call. A corrector walks over the best candidates of every depth
(kernels/walk.py), in one call for a chain and one per level of a tree, unless it carries a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from infer.batch.tree import MAX_NODES
from infer.kvcache.tensors import KVLayers
from infer.speculation.proposers.draft_loops.base import LogitsAt, Unread, rows_past
from infer.speculation.proposers.draft_loops.mask import OneForwardLoop
from infer.speculation.proposers.draft_loops.tree_shapes import Children, Run, TreeShape
from kernels.operands import Lattice, Picked, Transition
from kernels.rows import AttentionRows
from kernels.walk import make_lattice, rank_candidates, walk_chain
from models.attention import Attention, WriteKeys
from models.heads.block import BlockHead, base_logits, block_inputs
from models.heads.config import CANDIDATES


class BlockLoop(OneForwardLoop):
    """A slot of the context lies at its place like a recurrent head's, the block's rows at the places after the root's.

    These keep no KV: the context that is read next overwrites it.
    """

    _head: BlockHead
    _write: Callable[[AttentionRows], WriteKeys]  # stores keys and values of rows in the head's KV layers

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head)
        self._corrector = head.corrector
        self._candidates = self._corrector.num_candidates(CANDIDATES)  # None if nothing is corrected

    def attach(self, layers: KVLayers, first_layer: int) -> None:
        super().attach(layers, first_layer)
        self._write = partial(layers.writer, first_layer=first_layer)

    def places(self, depth: int, shape: TreeShape | None) -> int:
        return self._head.config.block_rows(depth)

    def choices(self, candidates: int) -> int:
        self._candidates = self._corrector.num_candidates(candidates)
        return min(len(self.draft_ids), self._candidates or len(self.draft_ids))

    def read(self, unread: Unread) -> None:
        """Write the context of the unread rows."""
        assert unread.rows is not None
        self._head.write_context(self.fused(unread.features), unread.slots, self._write(unread.rows))

    def _logits(self, unread: Unread, positions: Tensor) -> LogitsAt:
        """All tokens are corrected, not only candidates, since what adjusts the logits may rule candidates out."""
        corrector, (states, base) = self._corrector, self._run_block(unread, len(positions))
        anchors, carried = unread.ids[unread.ends], corrector.begin(states[:, 0])

        def logits_at(level: int, drafted: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
            nonlocal carried
            state, carried = corrector.walk(states[:, level], drafted[-1] if drafted else anchors, carried)
            confidence = corrector.confidence(state) if corrector.predicts_acceptance else None
            return corrector.corrected(base[:, level], state), confidence

        return logits_at

    def _all_logits(self, unread: Unread, deepest: int) -> Tensor:
        return self._run_block(unread, deepest)[1]

    def _chain(self, unread: Unread, deepest: int, *, scored: bool) -> tuple[Tensor, Tensor | None]:
        if self._candidates is None:
            return super()._chain(unread, deepest, scored=scored)
        corrector, anchors = self._corrector, unread.ids[unread.ends]
        states, lattice, transition = self._lattice(unread, deepest)
        if transition.predecessor is not None:
            tokens, values = walk_chain(lattice, transition, anchors, unread.parameters, unread.root)
        else:
            carried, drafted, scores = corrector.begin(states[:, 0]), [anchors], list[Tensor]()
            for slot in range(deepest):
                state, carried = corrector.walk(states[:, slot], drafted[-1], carried)
                query, position = corrector.query(state)[:, None], unread.root + slot
                token, value = rank_candidates(lattice, slot, transition, query, unread.parameters, position, 1)
                drafted.append(token[:, 0, 0])
                scores.append(value[:, 0, 0])
            tokens, values = torch.stack(drafted[1:], dim=1), torch.stack(scores, dim=1)
        if not (scored and corrector.predicts_acceptance):
            return tokens, values
        before = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
        return tokens, corrector.confidence(corrector.walk(states, before, corrector.begin(states))[0])

    def _growing(self, unread: Unread, shape: TreeShape, deepest: int) -> tuple[Children, Run]:
        """With a corrector each node has its own children, from the candidates of its depth and its token."""
        if self._candidates is None:
            return super()._growing(unread, shape, deepest)
        corrector, (states, lattice, transition) = self._corrector, self._lattice(unread, deepest)
        before, carried = unread.ids[unread.ends][:, None], corrector.begin(states[:, :1])  # [B, M], [B, M, C]

        def children(level: int, fan_out: int) -> tuple[Tensor, Tensor]:
            nonlocal carried
            slot = level - 1
            if transition.predecessor is not None:
                query = transition.query(slot, before)
            else:
                rows = states[:, slot, None].expand(-1, before.shape[1], -1)
                state, carried = corrector.walk(rows, before, carried)
                query = corrector.query(state)
            position = unread.root + slot
            return rank_candidates(lattice, slot, transition, query, unread.parameters, position, fan_out)

        def run(level: int, picked: Picked) -> None:
            nonlocal before, carried
            before = picked.token
            if carried.shape[-1]:
                carried = carried.gather(1, picked.parent[..., None].expand(-1, -1, carried.shape[-1]).long())

        return children, run

    def _lattice(self, unread: Unread, deepest: int) -> tuple[Tensor, Lattice, Transition]:
        """Run the blocks; return the rows' states, the candidates, and what scores them."""
        states, base = self._run_block(unread, deepest)
        transition = self._corrector.transition(states)
        assert transition is not None
        assert self._candidates is not None
        return states, make_lattice(base, unread.parameters, unread.root, self.draft_ids, self._candidates), transition

    def _run_block(self, unread: Unread, deepest: int) -> tuple[Tensor, Tensor]:
        """Return the states `[B, deepest, S]` of every depth's row, and the LM head's logits `[B, deepest, Vd]`."""
        self.read(unread)
        head, first = self._head, self._head.config.first_row
        states = self._block_states(unread, head.config.block_rows(deepest))[:, first : first + deepest]
        return states, base_logits(head, states.flatten(0, 1)).unflatten(0, states.shape[:2])

    def _block_states(self, unread: Unread, rows: int) -> Tensor:
        """Run a block of `rows` rows per request; return their states `[B, rows, S]`."""
        ids, positions = block_inputs(self._head, unread.ids[unread.ends], unread.root, rows)

        def attend(causal: bool) -> Attention:
            bits = torch.full((len(ids), rows), -1 if rows == MAX_NODES else (1 << rows) - 1, device=ids.device)
            tree_mask = None if causal else bits
            return self.attention(rows_past(unread, unread.root - unread.base, rows, shift=1, tree_mask=tree_mask))

        states = self._head.block_states(ids.flatten(), positions.flatten(), attend, rows)
        return states.unflatten(0, ids.shape)
