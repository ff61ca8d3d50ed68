"""Training-time test, and in the last part of a run training on what the head drafts itself.

Teacher-forced, a head never runs on a token that it drafts and the text lacks; in a tree, and at a temperature, most
nodes follow such tokens. So a sample of slots reads tokens that are drawn from the head's own distribution, and their
teacher is the target run on the same branch (train/features/online.py), never what it says after the text's tokens.
What follows an end token is of no use in serving, and not trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from models.heads.base import Head
from models.heads.objectives import TttConfig
from train.data.sequences import Batch
from train.features.online import Features, branch_states
from train.objectives import alignment
from train.objectives.base import Objective, Pairs, StepSums, in_fp32
from train.objectives.block import random_slots
from train.objectives.draft_states import draft_states
from train.objectives.teacher import Teacher

TEXT, ENDED = -1, -2  # in place of a row of the teacher


class TttObjective(Objective):
    """Trains on drafts of the head where the features have a `context`, in which the target can continue them."""

    config: TttConfig

    def forward(
        self,
        batch: Batch,
        features: Features,
        teacher: Teacher | None,  # none is read if there is a context
        denominators: Tensor,
        metrics: bool = True,
        generator: torch.Generator | None = None,
        progress: float = 0.0,
    ) -> tuple[Tensor, StepSums]:
        context = features.context
        if context is None:
            assert teacher is not None
            return super().forward(batch, features, teacher, denominators, metrics, generator, progress)
        assert generator is not None, "slots and drafts are drawn"
        aux = self._noisy(features.aux, generator)
        first, slots = self.slots(batch, generator)
        served = alignment.at(alignment.served(batch.assistant), slots[0])
        drafts = Drafts(self.head, random_slots(served, self.config.on_policy_slots, generator), generator)
        states = list(draft_states(self.head, batch.ids, aux, self.steps, first, slots, batch.starts, drafts))
        tokens = torch.stack(drafts.tokens, dim=-1)
        text = features.hidden[alignment.teacher_rows(batch.assistant)]
        with in_fp32(tokens.device.type):  # no autocast: the target runs in the precision of serving
            branches = branch_states(context, batch, alignment.at(slots[0], drafts.columns), tokens)
            taught = self.teach(context.target, torch.cat([text, branches.flatten(0, 2)]), None)
        ends = sum((tokens == end for end in context.target.end_tokens), torch.zeros_like(tokens)) > 0
        rows = branch_rows(drafts.columns, ends, served.shape[1], len(text))
        return self.losses(states, redirected(self.pairs(batch, first, slots), rows), taught, denominators, metrics)


class Drafts:
    """Draws the tokens that some slots read at every depth past 0, and keeps them: `tokens`, `[B, M]` of each depth.

    columns `[B, M]`: where these slots are among those of the states.
    """

    def __init__(self, head: Head, columns: Tensor, generator: torch.Generator) -> None:
        self.columns, self.tokens = columns, list[Tensor]()
        self._head, self._generator = head, generator

    @torch.no_grad()
    def __call__(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """As train.objectives.draft_states.Redraft."""
        logits = self._head.logits(alignment.at(states, self.columns), depth - 1).float()
        uniform = torch.rand(logits.shape, generator=self._generator, device=logits.device)
        sample = (logits - (-uniform.log()).log()).argmax(-1)  # Gumbel noise; unlike multinomial it takes NaN
        self.tokens.append(self._head.target_ids[sample])
        return tokens.scatter(1, self.columns, self.tokens[-1])


def branch_rows(columns: Tensor, ends: Tensor, size: int, first: int) -> Tensor:
    """Return the branches' rows of the teacher by depth and slot, `[K, B, size]`; TEXT if it is the text's.

    ENDED if there is none. columns `[B, M]`: where the branches' slots are; ends bool `[B, M, K - 1]`: which drafted
    tokens end a text; the branches' rows begin at `first`, and lie in the order of `ends`.
    """
    numbers = first + torch.arange(ends.numel(), device=ends.device).view(ends.shape)
    numbers = numbers.masked_fill(ends.cumsum(-1) > 0, ENDED).permute(2, 0, 1)
    rows = numbers.new_full((len(numbers) + 1, len(columns), size), TEXT)
    rows[1:].scatter_(2, columns.expand(len(numbers), -1, -1), numbers)
    return rows


def redirected(pairs: Iterable[Pairs], rows: Tensor) -> Iterator[Pairs]:
    """Give the pairs of every depth the rows of `branch_rows`, and leave out those that have none."""
    for pair, of_step in zip(pairs, rows.flatten(1), strict=True):
        row = of_step[pair.slots]
        kept = (row != ENDED).nonzero().squeeze(-1)
        taught = torch.where(row == TEXT, pair.rows, row)
        yield Pairs(pair.slots[kept], pair.weights[kept], taught[kept], pair.share)
