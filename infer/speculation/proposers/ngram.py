"""N-gram lookup (prompt lookup decoding): drafts what followed the latest earlier occurrence of the current suffix."""

from __future__ import annotations

from collections.abc import Sequence

from infer.batch.tree import Budget, DraftTree
from infer.request import Proposer, ProposerState, Request


class SuffixIndex(ProposerState):
    """Maps each n-gram of a growing token list to the end of its latest occurrence.

    Each token is indexed once; a lookup costs O(max - min).
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams ending before this place are in the index

    def continuation(self, tokens: list[int], budget: int) -> list[int]:
        """Return up to `budget` tokens after the latest earlier occurrence of the longest matching suffix; [] for none.

        `tokens` must extend the list of the previous call.
        """
        for end in range(self._indexed + 1, len(tokens)):  # the current suffix must not match itself
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for size in self._sizes:
            if size < len(tokens):
                end = self._ends.get(tuple(tokens[-size:]))
                if end is not None:
                    return tokens[end : end + budget]
        return []


class NgramProposer(Proposer):
    """Drafts a chain from the request's own prompt and output; reads no features and keeps no KV.

    `shortest`, `longest`: tokens of the suffix that is looked up.
    """

    name = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = shortest, longest

    def begin(self, request: Request) -> SuffixIndex:
        return SuffixIndex(*self._sizes)

    def propose(
        self, requests: Sequence[Request], states: Sequence[SuffixIndex], budgets: Sequence[Budget]
    ) -> DraftTree:
        drafts = [
            index.continuation(request.tokens, budget.depth)
            for request, index, budget in zip(requests, states, budgets, strict=True)
        ]
        return DraftTree.chains([request.tokens[-1] for request in requests], drafts)
