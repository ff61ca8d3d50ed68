"""How likely copied tokens are: pure functions and running rates of the drafts that an automaton of a text makes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

from infer.speculation.proposers.suffix_decoding.automaton import ROOT, Edge, SuffixAutomaton

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # of matches whose rates are kept apart: up to each, and beyond
# Shares of right tokens, relative to the share of the token among those that followed, before any evidence.
PRIORS = (0.36, 0.6, 0.74, 0.82, 0.86, 0.88, 0.9, 0.94, 0.95, 0.97, 0.98, 0.99)
PRIOR_WEIGHT = 8.0  # tokens that a prior counts like
CERTAIN = 0.995  # no token is taken to be likelier
REQUEST_DECAY, USUAL_DECAY = 0.98, 0.999


class CopyRates:
    """By length of the match, decayed sums of predicted shares and of right tokens."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._expected, self._right = [0.0] * len(PRIORS), [0.0] * len(PRIORS)

    def record(self, place: int, share: float, right: bool) -> None:
        self._expected[place] = self._decay * self._expected[place] + share
        self._right[place] = self._decay * self._right[place] + right

    def rate(self, place: int, prior: float) -> float:
        rate = (self._right[place] + PRIOR_WEIGHT * prior) / (self._expected[place] + PRIOR_WEIGHT)
        return min(rate, CERTAIN)


def place_of(length: int) -> int:
    return bisect_left(LENGTHS, length)


class Draft(NamedTuple):
    """A chain, and the probability of each of its tokens to be accepted."""

    tokens: list[int]
    chances: list[float]

    @property
    def expected(self) -> float:
        return sum(self.chances)


NO_DRAFT = Draft([], [])


def likeliest(edges: dict[int, Edge]) -> tuple[int, Edge, float]:
    """Return the token that followed most often, of several the one that did last, its edge and its share."""
    if len(edges) == 1:
        ((token, edge),) = edges.items()
        return token, edge, 1.0
    token, edge = max(edges.items(), key=lambda item: (item[1].count, item[1].place))
    return token, edge, edge.count / max(1, sum(other.count for other in edges.values()))


def follow(
    automaton: SuffixAutomaton, state: int, length: int, rate: Callable[[int], float], most: int, least: float
) -> Draft:
    """Return what most often followed a match of `length` tokens in `state`: at most `most` tokens.

    The chain ends before a token whose probability is below `least`. At the end of the text it goes on with what
    followed the longest of its suffixes that occurred before: a text that repeats itself goes on doing so.
    """
    tokens, chances, chance = list[int](), list[float](), 1.0
    while len(tokens) < most:
        while not automaton.edges[state] and state != ROOT:
            state = automaton.link[state]
            length = min(length, automaton.length[state])
        if state == ROOT:
            break
        token, edge, share = likeliest(automaton.edges[state])
        chance *= share * rate(length)
        if chance < least:
            break
        tokens.append(token)
        chances.append(chance)
        state, length = edge.target, length + 1
    return Draft(tokens, chances)


def copied(tokens: Sequence[int], length: int, rate: Callable[[int], float], least: float) -> Draft:
    """Return a draft of the first of `tokens`, which follow a match of `length`; it ends as that of `follow` does."""
    rates = map(rate, range(length, length + len(tokens)))
    chances = list(takewhile(lambda chance: chance >= least, accumulate(rates, mul)))
    return Draft([*tokens[: len(chances)]], chances)
