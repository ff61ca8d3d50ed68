"""Drafts meaningless tokens at no cost, for synthetic acceptance (kernels/acceptance.py).

How many of them are accepted is set by the given rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer.batch.tree import Budget, DraftTree
from infer.request import Proposer, Request


class SyntheticProposer(Proposer):
    """Drafts chains that count up from the root's token, so that the text does not fall into a loop."""

    name = "synthetic"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[Request], states: Sequence[Any], budgets: Sequence[Budget]) -> DraftTree:
        roots = [request.tokens[-1] for request in requests]
        drafts = [
            [(root + depth + 1) % self._vocab_size for depth in range(budget.depth)]
            for root, budget in zip(roots, budgets, strict=True)
        ]
        return DraftTree.chains(roots, drafts)
