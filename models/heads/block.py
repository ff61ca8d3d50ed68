"""The protocol of block drafters, which fill a block of rows in one forward (DFlash, arXiv 2602.06036).

The context of a draft are keys and values that every layer computes from the target's fused features alone; slot i's
have rotary position i. The block drafted from slot i follows them: its anchor, token t[i+1] at position i + 1, and mask
tokens. Row k + `first_row` of the block yields the logits of depth k, token t[i+2+k].

A corrector makes the logits of a depth depend on the token before it, at far less than the cost of a forward:
`slot_state` puts what it reads of that token beside the state of the depth's row, and `corrected` changes the LM head's
logits by it. So tokens are drafted one after another in a chain, or for every node of a tree. What is drafted is one of
the `num_candidates` best tokens of a depth before the correction (kernels/walk.py): only these are corrected.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.walk import Transition
from models.attention import Attention, WriteKeys
from models.heads.borrowing import BorrowingHead

Attend = Callable[[bool], Attention]  # whether rows see only the rows before them -> the attention of such a layer


class BlockHead(BorrowingHead):
    """A head with one forward for the context, `write_context`, and one for the blocks, `block_states`."""

    parallel = True
    config: Any  # a HeadShape with the fields that are read here

    @property
    def num_candidates(self) -> int | None:
        """The number of tokens that the corrector chooses among; None where the proposer's config says how many."""
        return None

    @property
    def first_row(self) -> int:
        """The row of depth 0: the anchor's, or the first mask's where the anchor's row predicts nothing."""
        return 0 if self.config.sample_from_anchor else 1

    def block_rows(self, depth: int) -> int:
        """Return the number of rows of a block from which `depth` tokens are drafted.

        Rows that see later rows were trained with all of them; others do not depend on how many follow.
        """
        return self.first_row + depth if all(self.config.causal_layers) else self.config.block_size

    def scratch_places(self, depth: int) -> int:
        return self.block_rows(depth)

    def block_ids(self, anchors: Tensor, rows: int) -> Tensor:
        """Return the input tokens of blocks with these anchors, `[...]` -> `[..., rows]`."""
        ids = torch.full((*anchors.shape, rows), self.config.mask_token_id, device=anchors.device)
        ids[..., 0] = anchors
        return ids

    def block_positions(self, anchors: Tensor, rows: int) -> Tensor:
        """Return the positions of blocks whose anchors have these, `[...]` -> `[..., rows]`.

        Rows past the model's context, where no token will be, share its last position.
        """
        last = self.config.layer.max_position_embeddings - 1
        return (anchors[..., None] + torch.arange(rows, device=anchors.device)).clamp(max=last)

    def begin_walk(self, states: Tensor) -> Tensor:
        """Return what the corrector carries into depth 0, `[..., C]`, from the rows' states `[..., S]` of one depth."""
        return states[..., :0]

    def slot_state(self, states: Tensor, before: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state of a depth, `[..., S']`, and what is carried into the next, `[..., C]`.

        states `[..., S]`: of the depth's rows; before `[...]`: the token before it, the anchor at depth 0.
        """
        return states, carried

    def transition(self, states: Tensor) -> Transition:
        """Return what scores candidates in blocks whose rows have the states `[B, D, S]`.

        Without a `predecessor` in it the query of a depth is that of its `slot_state`.
        """
        raise AssertionError("this head corrects nothing")

    def query(self, state: Tensor) -> Tensor:
        """Return the query `[..., r]` of a depth's `slot_state`."""
        raise AssertionError("this head corrects nothing")

    def base_logits(self, states: Tensor) -> Tensor:
        """Return the LM head's logits `[..., Vd]` of rows' states `[..., S]`."""
        return self.lm_head_at(0)(states)

    def corrected(self, logits: Tensor, state: Tensor) -> Tensor:
        """Return the logits `[..., Vd]` of a depth, from those of the LM head and the state of `slot_state`."""
        return logits

    @property
    def predicts_acceptance(self) -> bool:
        """Whether there is a `confidence`."""
        return False

    def confidence(self, state: Tensor) -> Tensor:
        """Return the logarithm of the probability `[...]` that the depth's token is accepted if those before it are.

        state: of `slot_state`, of which only what does not depend on `carried` is read.
        """
        raise AssertionError("this head predicts no acceptance")

    def logits(self, state: Tensor, depth: int) -> Tensor:
        return self.corrected(self.base_logits(state[..., : self.config.hidden_size]), state)

    @abstractmethod
    def write_context(self, state: Tensor, positions: Tensor, write: WriteKeys) -> None:
        """Compute every layer's keys and values of the context from its fused features `[..., S]`, and store them."""

    @abstractmethod
    def block_states(self, ids: Tensor, positions: Tensor, attend: Attend, rows: int) -> Tensor:
        """Run blocks of `rows` rows, ids and positions `[...]`, over the context; return their states `[..., S]`.

        The last dimension is a block's rows, or several blocks' in a row.
        """

    def step(self, ids: Tensor, state: Tensor, positions: Tensor, attention: Attention, depth: int) -> Tensor:
        raise AssertionError("a block drafter has no steps")
