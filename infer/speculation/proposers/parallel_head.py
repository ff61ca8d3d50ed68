"""Drafts with a head that predicts every depth in one forward.

Medusa does so from the target's state alone, P-EAGLE with one mask slot per further depth, in rows that follow the
committed ones. What is drafted at a depth does not depend on what was drafted before it, so all nodes of a tree level
have the same children. Committed positions are read, pages used and tokens chosen as with every head (head.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from infer.request import Request
from infer.sampling.batch import choice_parameters
from infer.speculation.budget import Budget
from infer.speculation.proposers.head import HeadProposer
from infer.speculation.tree import DraftTree
from infer.speculation.tree_shapes import Children, Run
from kernels.choose import ChoiceParameters


class ParallelHeadProposer(HeadProposer):
    def places(self, budget: Budget) -> int:
        return max(budget.nodes, budget.depth - 1)

    def _draft_chains(self, requests: list[Request], budgets: list[Budget]) -> DraftTree:
        logits = self._all_logits(requests, budgets).flatten(0, 1)  # [B * D, Vd]
        device, deepest = logits.device, len(logits) // len(requests)
        owner = torch.arange(len(requests), device=device).repeat_interleave(deepest)
        parameters = choice_parameters(requests, device, drafting=True)
        parameters = parameters and parameters.rows(owner)
        roots = torch.tensor([len(request.tokens) - 1 for request in requests], device=device)
        positions = (roots[:, None] + torch.arange(deepest, device=device)).flatten()
        tokens = self.choice(logits, positions, parameters).view(len(requests), deepest).tolist()
        drafts = [chain[: budget.depth] for chain, budget in zip(tokens, budgets, strict=True)]
        tree = DraftTree.chains([request.tokens[-1] for request in requests], drafts)
        probs = self.draft_probs([requests[index] for index in owner.tolist()], logits, parameters)
        for index, budget in enumerate(budgets):
            if index * deepest in probs:
                rows = range(index * deepest, index * deepest + budget.depth)
                tree.draft_probs[index] = torch.stack([probs[row] for row in rows])
        return tree

    def _growing(self, requests: list[Request], budgets: list[Budget]) -> tuple[Children, Run]:
        logits = self._all_logits(requests, budgets)
        parameters = choice_parameters(requests, logits.device, drafting=True)
        roots = torch.tensor([len(request.tokens) - 1 for request in requests], device=logits.device)
        return self.growing_parallel(logits, roots, parameters)

    def growing_parallel(
        self, logits: Tensor, roots: Tensor, parameters: ChoiceParameters | None
    ) -> tuple[Children, Run]:
        """Return the callbacks for `grow`, from the logits `[B, D, Vd]` of all depths; roots `[B]`: positions."""

        def children(level: int, fan_out: int) -> tuple[Tensor, Tensor]:
            tokens, values = self.best(logits[:, level - 1], roots + level - 1, parameters, fan_out)
            return tokens[:, None], values[:, None]

        def run(level: int, parent: Tensor, token: Tensor) -> None:
            pass  # the next level does not depend on it

        return children, run

    def _all_logits(self, requests: list[Request], budgets: list[Budget]) -> Tensor:
        """Return the logits `[B, D, Vd]` of every depth up to the deepest budget; past a request's budget undefined."""
        depths = [budget.depth for budget in budgets]
        deepest = max(depths)
        if self.mask_slot is None:
            state = self._read_pending(requests)
            return self._head.all_logits(state, deepest)
        counts = [self._pending[request.request_id].count for request in requests]
        states = self._read_pending(requests, [depth - 1 for depth in depths])
        slot = torch.tensor([count + depth - 1 for count, depth in zip(counts, depths, strict=True)]).cumsum(0)
        depth_counts = torch.tensor(depths)
        # the rows of depths 0, 1, ... are each request's last rows; past its budget its deepest row is repeated
        index = (slot - depth_counts)[:, None] + torch.arange(deepest).clamp(max=(depth_counts - 1)[:, None])
        # all depths share one LM head, so one call computes all logits
        logits = self._head.logits(states[index.flatten().to(states.device)], 0)
        return logits.unflatten(0, (len(requests), deepest))
