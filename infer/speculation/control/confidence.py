"""Early exit of chains: after each token, whether to draft on, from the drafter's probabilities calibrated online.

A token that is reached is right with probability σ(a logit(h) + b logit(c) + d): h is the past conditional acceptance
rate at its depth (acceptance_model.py), c the drafter's probability of it under the noise that it was chosen with. The
weights are learnt from every verified token, separately for greedy and sampled requests. A token is worth a row, or
another level of drafting, if the probability that it is emitted exceeds what that costs, in tokens at the speed
expected now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from infer.request import Request
from infer.speculation.control.acceptance_model import DRAFTER_DECAY, AcceptanceModel

DRAFTER = "head"  # the proposer whose chains are scored
LEARNS = 0.05  # step size of the gradient descent (LOG.md, 2026-11-21, "How sure a draft is")
MIN_CHANCE = 1e-3  # probabilities nearer to 0 and 1 count as this near: fewer drafts than 1,000 support none


class Prices(NamedTuple):
    """Least expected gains, in tokens: of a verified row, of a request for one more drafter step, and of that step.

    `level` is what all requests must gain together for that step to run.
    """

    row: float
    step: float
    level: float


class ExitTerms(NamedTuple):
    """What decides on a chain, up to its log-probabilities, for decisions on a device (early_exit.py)."""

    slope: float  # b
    offsets: list[float]  # a logit(h) + d at each depth
    following: list[float]  # by depth, the probability by history that a token after a right one is right too


class ExitDecision(NamedTuple):
    """Whether a drafted token is worth its row, and whether one more after it is worth drafting."""

    keep: bool
    continue_: bool


def logit(chance: float) -> float:
    chance = min(max(chance, MIN_CHANCE), 1 - MIN_CHANCE)
    return math.log(chance / (1 - chance))


class Calibration:
    """The map from (logit h, logit c, 1) to a probability."""

    def __init__(self) -> None:
        self.weights = (0.5, 0.5, 0.0)  # at first, the geometric mean of both odds

    def chance(self, features: Sequence[float]) -> float:
        score = sum(weight * value for weight, value in zip(self.weights, features, strict=True))
        return 1 / (1 + math.exp(-score))

    def learn(self, features: Sequence[float], chance: float, right: bool) -> None:
        """Take a gradient step on one token. `chance`: the probability that was predicted from these features."""
        step = LEARNS * (right - chance)
        self.weights = tuple(w + step * value for w, value in zip(self.weights, features, strict=True))


@dataclass
class Drafted:
    """The scores of one request's chain in this step, token by token; `history` covers greater depths too."""

    sampled: bool
    history: tuple[float, ...]  # the probability that a draft is accepted down to each depth, whatever its tokens
    features: list[tuple[float, float, float]] = field(default_factory=list)
    right: list[float] = field(default_factory=list)  # the probability that each is right, once it is reached
    chances: list[float] = field(default_factory=list)  # that it is emitted

    def conditional(self, place: int) -> float:
        before = self.history[place - 1] if place else 1.0
        return self.history[place] / before if before else 0.0


class Confidence:
    """Decides on the early exit of chains.

    `prices` None: every chain is drafted to its full budget, and learnt from. `scoring` false: no chain is scored.
    """

    def __init__(self, acceptance: AcceptanceModel) -> None:
        self.scoring = True
        self.prices: Prices | None = None
        self.counts: list[int] = []  # by level, the number of chains that took part in the last draft
        self._acceptance = acceptance
        self._maps = {False: Calibration(), True: Calibration()}  # by whether the request is sampled
        self._drafts: dict[str, Drafted] = {}
        self._tokens = self._error = self._plain_error = 0.0

    def start(self, requests: Sequence[Request], depths: Sequence[int]) -> None:
        """Start the chains of these requests, at most `depths[b]` deep.

        Not scored are chains for block verification, whose length must not depend on the drafted tokens, and those that
        hold drafts of other proposers too.
        """
        self.counts = []
        for request, depth in zip(requests, depths, strict=True):
            self._drafts.pop(request.request_id, None)
            draft = self._begin(request, depth)
            if draft is not None:
                self._drafts[request.request_id] = draft

    def _begin(self, request: Request, depth: int) -> Drafted | None:
        params = request.params
        if params.proposer not in (None, DRAFTER) or params.acceptance == "block":
            return None
        history = self._acceptance.chances(request.request_id, DRAFTER, depth, params.temperature > 0)
        return Drafted(params.temperature > 0, history)

    def terms(self, request: Request, depth: int) -> ExitTerms | None:
        """Return the terms of a chain of at most `depth` tokens; None if it is not to be scored."""
        draft = self._begin(request, depth) if self.scoring and depth else None
        if draft is None:
            return None
        history, slope, constant = self._maps[draft.sampled].weights
        conditional = [draft.conditional(place) for place in range(depth)]
        return ExitTerms(slope, [history * logit(value) + constant for value in conditional], [*conditional[1:], 0.0])

    def record(self, request: Request, depth: int, log_probabilities: Sequence[float]) -> None:
        """Take the tokens of a chain whose length was decided by its `terms`, to learn from them in `update`."""
        prices, self.prices = self.prices, None
        self.start([request], [depth])
        for value in log_probabilities:
            self.score([request], [value])
        self.prices = prices

    def score(self, requests: Sequence[Request], log_probabilities: Sequence[float]) -> list[ExitDecision]:
        """Score one more drafted token of each request, from its log-probability. A chain's first is always kept."""
        self.counts.append(len(requests))
        verdicts, surplus = [], 0.0
        for request, value in zip(requests, log_probabilities, strict=True):
            draft = self._drafts.get(request.request_id)
            if draft is None:
                verdicts.append(ExitDecision(True, True))
                surplus = math.inf
                continue
            place, prices = len(draft.chances), self.prices
            features = (logit(draft.conditional(place)), logit(math.exp(value)), 1.0)
            right = self._maps[draft.sampled].chance(features)
            chance = right * (draft.chances[-1] if place else 1.0)
            if prices is not None and place and chance < prices.row:
                verdicts.append(ExitDecision(False, False))
                continue
            draft.features.append(features)
            draft.right.append(right)
            draft.chances.append(chance)
            deeper = place + 1 < len(draft.history)
            gain = chance * draft.conditional(place + 1) if deeper else 0.0
            if prices is None:
                surplus = math.inf
            elif deeper:
                gain -= prices.row + prices.step
                surplus += max(gain, 0.0)
                deeper = gain > 0
            verdicts.append(ExitDecision(True, deeper))
        if self.prices is not None and surplus < self.prices.level:
            verdicts = [ExitDecision(verdict.keep, False) for verdict in verdicts]
        return verdicts

    def update(self, request_id: str, depth: int, accepted: int) -> float | None:
        """Learn that `accepted` of the chain's first `depth` tokens were right.

        Returns how many had been expected, None if the chain was not scored.
        """
        draft = self._drafts.pop(request_id, None)
        if draft is None:
            return None
        calibration, chances = self._maps[draft.sampled], draft.chances[:depth]
        for place, (chance, plain) in enumerate(zip(chances, draft.history, strict=False)):
            emitted = place < accepted
            self._tokens = DRAFTER_DECAY * self._tokens + 1
            self._error = DRAFTER_DECAY * self._error + (chance - emitted) ** 2
            self._plain_error = DRAFTER_DECAY * self._plain_error + (plain - emitted) ** 2
            if place <= accepted:
                calibration.learn(draft.features[place], draft.right[place], emitted)
        return sum(chances)

    def forget(self, request_id: str) -> None:
        self._drafts.pop(request_id, None)

    @property
    def errors(self) -> tuple[float, float] | None:
        """Recent Brier scores: mean squared errors of the probabilities, and of those by depth and history alone."""
        return (self._error / self._tokens, self._plain_error / self._tokens) if self._tokens else None
