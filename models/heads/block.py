"""Block drafters, the kind of heads that fill a block of rows in one forward (DFlash, arXiv 2602.06036).

The context of a draft are keys and values that every layer computes from the target's fused features alone; slot i's
have rotary position i. The block drafted from slot i follows them: its anchor, token t[i+1] at position i + 1, and mask
tokens. Row k + `config.first_row` of the block yields the logits of depth k, token t[i+2+k].

A corrector makes the logits of a depth depend on the token before it, at far less than the cost of a forward: `walk`
puts what it reads of that token beside the state of the depth's row, and `corrected` changes the LM head's logits by
it. So tokens are drafted one after another in a chain, or for every node of a tree. What is drafted is one of the best
tokens of a depth before the correction (kernels/walk.py): only these are corrected.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.operands import Transition
from models.attention import Attention, WriteKeys
from models.heads.base import Head

Attend = Callable[[bool], Attention]  # whether rows see only the rows before them -> the attention of such a layer


class Corrector:
    """Changes the logits of a depth by the token before it. This one changes nothing."""

    predicts_acceptance: bool = False  # whether there is a `confidence`

    def num_candidates(self, configured: int) -> int | None:
        """Return how many tokens of a depth are corrected, `configured` unless the head says; None if none is."""
        return None

    def begin(self, states: Tensor) -> Tensor:
        """Return what it carries into depth 0, `[..., C]`, from the rows' states `[..., S]` of one depth."""
        return states[..., :0]

    def walk(self, states: Tensor, before: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state of a depth, `[..., S']`, and what is carried into the next, `[..., C]`.

        states `[..., S]`: of the depth's rows; before `[...]`: the token before it, the anchor at depth 0.
        """
        return states, carried

    def corrected(self, logits: Tensor, state: Tensor) -> Tensor:
        """Return the logits `[..., Vd]` of a depth, from those of the LM head and the state of `walk`."""
        return logits

    def transition(self, states: Tensor) -> Transition | None:
        """Return what scores candidates in blocks whose rows have the states `[B, D, S]`; None if nothing is corrected.

        Without a `predecessor` in it the query of a depth is that of its state.
        """
        return None

    def query(self, state: Tensor) -> Tensor:
        """Return the query `[..., r]` of the state that `walk` returned."""
        return state[..., :0]

    def confidence(self, state: Tensor) -> Tensor:
        """Return the logarithm of the probability `[...]` that the depth's token is accepted if those before it are.

        Of the state that `walk` returned only what does not depend on `carried` is read.
        """
        return state.new_zeros(state.shape[:-1])


class BlockHead(Head):
    """A head with one forward for the context, `write_context`, and one for the blocks, `block_states`."""

    @property
    def corrector(self) -> Corrector:
        return Corrector()

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Return the corrected logits `[..., Vd]` of a depth, from the state that the corrector's `walk` returned."""
        return self.corrector.corrected(base_logits(self, state), state)

    @abstractmethod
    def write_context(self, state: Tensor, positions: Tensor, write: WriteKeys) -> None:
        """Compute every layer's keys and values of the context from its fused features `[..., S]`, and store them."""

    @abstractmethod
    def block_states(self, ids: Tensor, positions: Tensor, attend: Attend, rows: int) -> Tensor:
        """Run blocks of `rows` rows, ids and positions `[...]`, over the context; return their states `[..., S]`.

        The last dimension is a block's rows, or several blocks' in a row.
        """


def base_logits(head: BlockHead, states: Tensor) -> Tensor:
    """Return the LM head's logits `[..., Vd]` of rows' states `[..., S]`, or of those that a corrector extended."""
    return head.readout(0).lm_head(states[..., : head.config.hidden_size])


def block_inputs(head: BlockHead, anchors: Tensor, positions: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return input tokens and positions of blocks with these anchors at these positions, `[...]` -> `[..., rows]` each.

    Rows past the model's context, where no token will be, share its last position.
    """
    ids = torch.full((*anchors.shape, rows), head.config.mask_token_id, device=anchors.device)
    ids[..., 0] = anchors
    last = head.config.layer.max_position_embeddings - 1
    return ids, (positions[..., None] + torch.arange(rows, device=positions.device)).clamp(max=last)
