"""How likely a drafted token is to be emitted: learnt from what was accepted, per request and per drafter.

Of a chain, by depth: depth j is reached when every shallower draft of the path was right, so the chance that it
survives is the product of conditional acceptances down to it. Of a tree, by rank: nodes stand in the order of what
their drafter thinks of them, and how often the r-th of them was on the accepted path says what a tree of any size
brings. Each of these is a share of recent hits, drawn towards the drafter's own share while the request has shown
little. Evidence fades, so that a change of content is noticed.

Evidence of one kind says nothing of another: sampled tokens are guessed less often than greedy ones, and those of a
text's beginning less often than later ones. Drafts are tried where texts begin and given up where they fail, so without
ages a drafter would be known by its worst tokens alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from infer.speculation.budget import Budget, Verified, cuts

UNKNOWN = 0.5  # conditional acceptance of a drafter of which nothing is known
OWN_FADES, DRAFTERS_FADE = 0.97, 0.995  # of evidence, with every draft
LATELY = 0.98  # the same of the calibration that is shown
# A drafter's share counts like that many drafts of the request's own. With a quarter of it a few misses in a row, which
# chance alone brings in any sampled text, put an end to its drafts (LOG.md).
OWN_WEIGHT = 16.0
UNKNOWN_WEIGHT = 4.0  # how many drafts UNKNOWN counts like
# What training measured counts like so many drafts. The first after a prompt, a whole batch's at once, are worse than
# those within the model's own text, and would else put an end to drafting.
PRIOR_WEIGHT = 32.0
AGES = (16, 32)  # emitted tokens from which a text counts as older
# What is expected of a rank of a tree of which nothing is known: such a share of the one before it; the first is right
# as often as the first token of any draft.
NEXT_RANK = 0.8


class Kind(NamedTuple):
    """Of drafts that are right about as often."""

    sampled: bool = False
    age: int = len(AGES)

    @classmethod
    def of(cls, temperature: float, emitted: int) -> Kind:
        return cls(temperature > 0, bisect_right(AGES, emitted))

    @classmethod
    def counts(cls, temperature: float, emitted: int, end: int) -> dict[Kind, int]:
        """Of the tokens from `emitted` to `end` of a text, how many are of each kind."""
        edges = [emitted, *(age for age in AGES if emitted < age < end), end]
        return {cls.of(temperature, first): last - first for first, last in pairwise(edges)}


LATE = Kind()  # greedy drafts of a text that is well under way


@dataclass
class Shares:
    """By depth, faded counts of drafts that got so far, and of those that were right there."""

    fades: float
    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def record(self, depth: int, accepted: int) -> None:
        """A draft `depth` deep, of which the first `accepted` were right."""
        reached = min(depth, accepted + 1)
        missing = reached - len(self.tried)
        if missing > 0:
            self.tried += [0.0] * missing
            self.right += [0.0] * missing
        for place in range(reached):
            self.tried[place] = self.fades * self.tried[place] + 1.0
            self.right[place] = self.fades * self.right[place] + (place < accepted)

    def conditional(self, depth: int, prior: Sequence[float], weight: float) -> list[float]:
        found = []
        for place in range(depth):
            tried, right = (self.tried[place], self.right[place]) if place < len(self.tried) else (0.0, 0.0)
            towards = prior[place] if place < len(prior) else (prior[-1] if prior else UNKNOWN)
            found.append((right + weight * towards) / (tried + weight))
        return found


@dataclass
class Ranks:
    """By rank from 0, faded counts of drafts that had such a node, and of those where it was accepted."""

    fades: float
    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def record(self, nodes: int, path: Sequence[int]) -> None:
        """A draft of so many nodes, of which those of `path` were accepted. Of what it left out less is known now."""
        missing = nodes - len(self.tried)
        if missing > 0:
            self.tried += [0.0] * missing
            self.right += [0.0] * missing
        self.tried = [self.fades * own + (rank < nodes) for rank, own in enumerate(self.tried)]
        self.right = [self.fades * own for own in self.right]
        for node in path:
            self.right[node - 1] += 1.0

    def chance(self, rank: int, prior: float, weight: float) -> float:
        tried, right = (self.tried[rank], self.right[rank]) if rank < len(self.tried) else (0.0, 0.0)
        return (right + weight * prior) / (tried + weight)


class Survival:
    """`priors`: by drafter, the conditional acceptance by depth that its training measured of greedy drafts."""

    def __init__(self, priors: Mapping[str, Sequence[float]] | None = None) -> None:
        self._priors = dict(priors or {})
        self._drafters: dict[tuple[str, Kind], Shares] = {}
        self._requests: dict[tuple[str, str, Kind], Shares] = {}
        # The same of trees, by rank.
        self._drafters_ranks: dict[tuple[str, Kind], Ranks] = {}
        self._requests_ranks: dict[tuple[str, str, Kind], Ranks] = {}
        self._expected = self._emitted = 0.0
        # Chances since the last record: of chains by depth, of trees by rank.
        self._known: dict[tuple[str, str, int, Kind], tuple[float, ...]] = {}
        self._known_ranks: dict[tuple[str, str, Budget, Kind], tuple[float, ...]] = {}

    def record(self, request_id: str, drafter: str, draft: Verified, expected: float, kind: Kind = LATE) -> None:
        """What became of a draft of which `expected` tokens had been hoped to be accepted."""
        self._known.clear()
        self._known_ranks.clear()
        accepted = len(draft.path)
        self._drafters.setdefault((drafter, kind), Shares(DRAFTERS_FADE)).record(draft.depth, accepted)
        self._requests.setdefault((request_id, drafter, kind), Shares(OWN_FADES)).record(draft.depth, accepted)
        if not draft.asked.is_chain:
            self._drafters_ranks.setdefault((drafter, kind), Ranks(DRAFTERS_FADE)).record(draft.nodes, draft.path)
            self._requests_ranks.setdefault((request_id, drafter, kind), Ranks(OWN_FADES)).record(
                draft.nodes, draft.path
            )
        self._expected = LATELY * self._expected + expected
        self._emitted = LATELY * self._emitted + accepted

    def gains(self, request_id: str, drafter: str, allowed: Budget, kind: Kind = LATE) -> list[float]:
        """Of each of the `cuts` of what is allowed, how many of its tokens will be accepted."""
        if allowed.is_chain:
            return [*accumulate(self.chances(request_id, drafter, allowed.depth, kind))]
        sums = [*accumulate(self.ranks(request_id, drafter, allowed, kind))]
        return [sums[budget.nodes - 1] for budget in cuts(allowed)]

    def expected(self, request_id: str, drafter: str, draft: Verified, kind: Kind = LATE) -> float:
        """How many tokens of this draft it would have hoped to be accepted."""
        if draft.asked.is_chain:
            return sum(self.chances(request_id, drafter, draft.depth, kind))
        return sum(self.ranks(request_id, drafter, draft.asked, kind)[: draft.nodes])

    def chances(self, request_id: str, drafter: str, depth: int, kind: Kind = LATE) -> tuple[float, ...]:
        """By depth from 1 to `depth`, the chance that a draft survives to it."""
        asked = request_id, drafter, depth, kind
        if asked not in self._known:
            self._known[asked] = self._chances(*asked)
        return self._known[asked]

    def ranks(self, request_id: str, drafter: str, asked: Budget, kind: Kind = LATE) -> tuple[float, ...]:
        """By rank in a tree drafted under this budget, the chance that the node is accepted."""
        key = request_id, drafter, asked, kind
        if key not in self._known_ranks:
            self._known_ranks[key] = self._ranks(*key)
        return self._known_ranks[key]

    def _ranks(self, request_id: str, drafter: str, asked: Budget, kind: Kind) -> tuple[float, ...]:
        known = self._drafters_ranks.get((drafter, kind)) or Ranks(DRAFTERS_FADE)
        own = self._requests_ranks.get((request_id, drafter, kind))
        chances: list[float] = []
        for rank in range(asked.nodes):
            prior = NEXT_RANK * chances[-1] if chances else self.chances("", drafter, 1, kind)[0]
            chances.append(known.chance(rank, prior, UNKNOWN_WEIGHT))
        if own is not None:
            chances = [own.chance(rank, chance, OWN_WEIGHT) for rank, chance in enumerate(chances)]
        return tuple(chances)

    def _chances(self, request_id: str, drafter: str, depth: int, kind: Kind) -> tuple[float, ...]:
        known = self._drafters.get((drafter, kind)) or Shares(DRAFTERS_FADE)
        measured = () if kind.sampled else self._priors.get(drafter, ())
        prior = known.conditional(depth, measured, PRIOR_WEIGHT if measured else UNKNOWN_WEIGHT)
        own = self._requests.get((request_id, drafter, kind))
        conditional = prior if own is None else own.conditional(depth, prior, OWN_WEIGHT)
        chances, chance = [], 1.0
        for share in conditional:
            chance *= share
            chances.append(chance)
        return tuple(chances)

    def forget(self, request_id: str) -> None:
        self._requests = {key: own for key, own in self._requests.items() if key[0] != request_id}
        self._requests_ranks = {key: own for key, own in self._requests_ranks.items() if key[0] != request_id}
        self._known = {key: own for key, own in self._known.items() if key[0] != request_id}
        self._known_ranks = {key: own for key, own in self._known_ranks.items() if key[0] != request_id}

    @property
    def bias(self) -> float:
        """Calibration: accepted tokens over those expected, recently; 1 is right, below it hopes were too high."""
        return self._emitted / self._expected if self._expected else 1.0
