"""Acceptance model: the probability that a drafted token is emitted, learnt per request and per drafter.

Chains by depth: depth j is reached if every shallower draft of the path was right, so the probability that a draft is
accepted down to it is the product of the conditional acceptance rates. Trees by rank: nodes are in the order of their
drafter's scores, and how often the r-th of them was on the accepted path tells what a tree of any size yields. Each
rate is a share of recent hits, shrunk towards the drafter's rate while the request has little evidence. Evidence
decays, so that a change of content is noticed.

Each acceptance bucket has separate evidence: sampled tokens are predicted less often than greedy ones, and those at the
beginning of an output less often than later ones. Drafts are tried where outputs begin and given up where they fail, so
without ages a drafter would be judged by its worst tokens alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from infer.request import Request
from infer.speculation.budget import Budget, VerifiedDraft, candidate_budgets

UNKNOWN = 0.5  # conditional acceptance rate of a drafter without evidence
REQUEST_DECAY, DRAFTER_DECAY = 0.97, 0.995  # decay of evidence per draft: of a request, and of a drafter
BIAS_DECAY = 0.98  # the same for the calibration that is displayed
# The drafter's rate counts like this many drafts of the request. With a quarter of it a few misses in a row, which
# chance alone produces in any sampled text, put an end to its drafts (LOG.md).
REQUEST_WEIGHT = 16.0
UNKNOWN_WEIGHT = 4.0  # number of drafts that UNKNOWN counts like
# The rates measured in training count like this many drafts. The first drafts after a prompt, of a whole batch at once,
# are worse than those within the model's output, and would otherwise put an end to drafting.
PRIOR_WEIGHT = 32.0
AGES = (16, 32)  # numbers of emitted tokens at which the next age begins
# Prior of a tree's rank without evidence, as a share of the rank before it; the prior of the first rank is the
# acceptance rate of the first token of any draft.
NEXT_RANK = 0.8


class AcceptanceBucket(NamedTuple):
    """Acceptance bucket: drafts that are right about equally often."""

    sampled: bool = False
    age: int = len(AGES)

    @classmethod
    def of(cls, temperature: float, emitted: int) -> AcceptanceBucket:
        return cls(temperature > 0, bisect_right(AGES, emitted))

    @classmethod
    def counts(cls, temperature: float, emitted: int, end: int) -> dict[AcceptanceBucket, int]:
        """Return how many of an output's tokens from `emitted` to `end` are in each bucket."""
        edges = [emitted, *(age for age in AGES if emitted < age < end), end]
        return {cls.of(temperature, first): last - first for first, last in pairwise(edges)}


LATE = AcceptanceBucket()  # greedy drafts at the last age
LOOKAHEAD = 256  # tokens: few outputs reach max_tokens


def next_bucket(request: Request) -> AcceptanceBucket:
    """Return the acceptance bucket of the tokens that are drafted next for the request."""
    return AcceptanceBucket.of(request.params.temperature, request.output_length)


def buckets_ahead(request: Request) -> dict[AcceptanceBucket, int]:
    """Return how many tokens the request may still emit in each acceptance bucket, up to LOOKAHEAD."""
    begin = request.output_length
    return AcceptanceBucket.counts(request.params.temperature, begin, min(request.params.max_tokens, begin + LOOKAHEAD))


@dataclass
class Shares:
    """By depth, decayed counts of drafts that reached it, and of those that were right there."""

    decay: float
    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def record(self, depth: int, accepted: int) -> None:
        """Record a draft of this depth, of which the first `accepted` tokens were right."""
        reached = min(depth, accepted + 1)
        missing = reached - len(self.tried)
        if missing > 0:
            self.tried += [0.0] * missing
            self.right += [0.0] * missing
        for place in range(reached):
            self.tried[place] = self.decay * self.tried[place] + 1.0
            self.right[place] = self.decay * self.right[place] + (place < accepted)

    def conditional(self, depth: int, prior: Sequence[float], weight: float) -> list[float]:
        rates = []
        for place in range(depth):
            tried, right = (self.tried[place], self.right[place]) if place < len(self.tried) else (0.0, 0.0)
            towards = prior[place] if place < len(prior) else (prior[-1] if prior else UNKNOWN)
            rates.append((right + weight * towards) / (tried + weight))
        return rates


@dataclass
class Ranks:
    """By rank from 0, decayed counts of drafts that had such a node, and of those where it was accepted."""

    decay: float
    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def record(self, nodes: int, path: Sequence[int]) -> None:
        """Record a draft of this many nodes, of which those of `path` were accepted.

        The evidence on ranks that the draft left out decays too.
        """
        missing = nodes - len(self.tried)
        if missing > 0:
            self.tried += [0.0] * missing
            self.right += [0.0] * missing
        self.tried = [self.decay * count + (rank < nodes) for rank, count in enumerate(self.tried)]
        self.right = [self.decay * count for count in self.right]
        for node in path:
            self.right[node - 1] += 1.0

    def chance(self, rank: int, prior: float, weight: float) -> float:
        tried, right = (self.tried[rank], self.right[rank]) if rank < len(self.tried) else (0.0, 0.0)
        return (right + weight * prior) / (tried + weight)


class AcceptanceModel:
    """The acceptance model of all requests.

    `priors`: by drafter, the conditional acceptance rates by depth that training measured on greedy drafts.
    """

    def __init__(self, priors: Mapping[str, Sequence[float]] | None = None) -> None:
        self._priors = dict(priors or {})
        self._drafters: dict[tuple[str, AcceptanceBucket], Shares] = {}
        self._requests: dict[tuple[str, str, AcceptanceBucket], Shares] = {}
        # The same for trees, by rank.
        self._drafters_ranks: dict[tuple[str, AcceptanceBucket], Ranks] = {}
        self._requests_ranks: dict[tuple[str, str, AcceptanceBucket], Ranks] = {}
        self._expected = self._emitted = 0.0
        # Probabilities cached until the next `record`: of chains by depth, of trees by rank.
        self._chances_cache: dict[tuple[str, str, int, AcceptanceBucket], tuple[float, ...]] = {}
        self._ranks_cache: dict[tuple[str, str, Budget, AcceptanceBucket], tuple[float, ...]] = {}

    def record(
        self, request_id: str, drafter: str, draft: VerifiedDraft, expected: float, bucket: AcceptanceBucket = LATE
    ) -> None:
        """Record the outcome of a draft, of which `expected` tokens had been expected to be accepted."""
        self._chances_cache.clear()
        self._ranks_cache.clear()
        accepted = len(draft.path)
        self._drafters.setdefault((drafter, bucket), Shares(DRAFTER_DECAY)).record(draft.depth, accepted)
        self._requests.setdefault((request_id, drafter, bucket), Shares(REQUEST_DECAY)).record(draft.depth, accepted)
        if not draft.asked.is_chain:
            self._drafters_ranks.setdefault((drafter, bucket), Ranks(DRAFTER_DECAY)).record(draft.nodes, draft.path)
            self._requests_ranks.setdefault((request_id, drafter, bucket), Ranks(REQUEST_DECAY)).record(
                draft.nodes, draft.path
            )
        self._expected = BIAS_DECAY * self._expected + expected
        self._emitted = BIAS_DECAY * self._emitted + accepted

    def gains(self, request_id: str, drafter: str, allowed: Budget, bucket: AcceptanceBucket = LATE) -> list[float]:
        """Return the expected number of accepted tokens for each of the `candidate_budgets` of what is allowed."""
        if allowed.is_chain:
            return [*accumulate(self.chances(request_id, drafter, allowed.depth, bucket))]
        sums = [*accumulate(self.ranks(request_id, drafter, allowed, bucket))]
        return [sums[budget.nodes - 1] for budget in candidate_budgets(allowed)]

    def expected(self, request_id: str, drafter: str, draft: VerifiedDraft, bucket: AcceptanceBucket = LATE) -> float:
        """Return how many tokens of this draft are expected to be accepted."""
        if draft.asked.is_chain:
            return sum(self.chances(request_id, drafter, draft.depth, bucket))
        return sum(self.ranks(request_id, drafter, draft.asked, bucket)[: draft.nodes])

    def chances(self, request_id: str, drafter: str, depth: int, bucket: AcceptanceBucket = LATE) -> tuple[float, ...]:
        """Return, for each depth from 1 to `depth`, the probability that a draft is accepted down to it."""
        key = request_id, drafter, depth, bucket
        if key not in self._chances_cache:
            self._chances_cache[key] = self._chances(*key)
        return self._chances_cache[key]

    def ranks(
        self, request_id: str, drafter: str, budget: Budget, bucket: AcceptanceBucket = LATE
    ) -> tuple[float, ...]:
        """Return, by rank in a tree drafted under this budget, the probability that the node is accepted."""
        key = request_id, drafter, budget, bucket
        if key not in self._ranks_cache:
            self._ranks_cache[key] = self._ranks(*key)
        return self._ranks_cache[key]

    def _ranks(self, request_id: str, drafter: str, budget: Budget, bucket: AcceptanceBucket) -> tuple[float, ...]:
        drafter_ranks = self._drafters_ranks.get((drafter, bucket)) or Ranks(DRAFTER_DECAY)
        request_ranks = self._requests_ranks.get((request_id, drafter, bucket))
        chances: list[float] = []
        for rank in range(budget.nodes):
            prior = NEXT_RANK * chances[-1] if chances else self.chances("", drafter, 1, bucket)[0]
            chances.append(drafter_ranks.chance(rank, prior, UNKNOWN_WEIGHT))
        if request_ranks is not None:
            chances = [request_ranks.chance(rank, chance, REQUEST_WEIGHT) for rank, chance in enumerate(chances)]
        return tuple(chances)

    def _chances(self, request_id: str, drafter: str, depth: int, bucket: AcceptanceBucket) -> tuple[float, ...]:
        drafter_shares = self._drafters.get((drafter, bucket)) or Shares(DRAFTER_DECAY)
        measured = () if bucket.sampled else self._priors.get(drafter, ())
        prior = drafter_shares.conditional(depth, measured, PRIOR_WEIGHT if measured else UNKNOWN_WEIGHT)
        request_shares = self._requests.get((request_id, drafter, bucket))
        conditional = prior if request_shares is None else request_shares.conditional(depth, prior, REQUEST_WEIGHT)
        chances, chance = [], 1.0
        for share in conditional:
            chance *= share
            chances.append(chance)
        return tuple(chances)

    def forget(self, request_id: str) -> None:
        self._requests = {key: value for key, value in self._requests.items() if key[0] != request_id}
        self._requests_ranks = {key: value for key, value in self._requests_ranks.items() if key[0] != request_id}
        self._chances_cache = {key: value for key, value in self._chances_cache.items() if key[0] != request_id}
        self._ranks_cache = {key: value for key, value in self._ranks_cache.items() if key[0] != request_id}

    @property
    def bias(self) -> float:
        """Calibration: recently accepted tokens over expected ones; below 1, expectations were too high."""
        return self._emitted / self._expected if self._expected else 1.0
