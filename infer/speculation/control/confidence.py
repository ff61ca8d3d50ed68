"""Early exit of chains: after each token, whether to draft on, from the drafter's probabilities calibrated online.

A token that is reached is right with probability σ(a logit(h) + b logit(c) + d): h is the past conditional acceptance
rate at its depth (acceptance_model.py), c the drafter's probability of it under the noise that it was chosen with. The
weights are learnt from every verified token, separately for greedy and sampled requests. A token is worth a row, or
another level of drafting, if the probability that it is emitted exceeds what that costs, in tokens at the speed
expected now (early_exit.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from infer.batch.history import History, Score
from infer.batch.tree import Budget
from infer.request import Request
from infer.speculation.control.acceptance_model import DRAFTER_DECAY, AcceptanceModel

LEARNS = 0.05  # step size of the gradient descent; with it the Brier score fell from 0.206 to 0.141
MIN_CHANCE = 1e-3  # probabilities nearer to 0 and 1 count as this near: fewer drafts than 1,000 support none


class Prices(NamedTuple):
    """Least expected gains, in tokens: of a verified row, of a request for one more drafter step, and of that step.

    `level` is what all requests must gain together for that step to run.
    """

    row: float
    step: float
    level: float


FREE = Prices(-1.0, 0.0, -1.0)  # at which every chain is drafted to its full budget


def logit(chance: float) -> float:
    chance = min(max(chance, MIN_CHANCE), 1 - MIN_CHANCE)
    return math.log(chance / (1 - chance))


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score))


class Confidence:
    """The probabilities of tokens drafted by `drafter`, and the prices at which its chains exit early.

    `prices` None: every chain is drafted to its full budget, and learnt from. `scoring` false: no chain is scored.
    """

    def __init__(self, acceptance: AcceptanceModel, drafter: str = "head") -> None:
        self.drafter, self.scoring = drafter, True
        self.prices: Prices | None = None
        self._acceptance = acceptance
        # a, b and d, for greedy and for sampled requests; at first, the geometric mean of both odds
        self._weights = {False: (0.5, 0.5, 0.0), True: (0.5, 0.5, 0.0)}
        self._tokens = self._error = self._plain_error = 0.0

    def _histories(self, request: Request, depth: int) -> tuple[Sequence[float], list[float]] | None:
        """Return, by depth, the probability by history that a draft is accepted down to it, and the conditional one.

        None for chains that are not scored: those for block verification, whose length must not depend on the drafted
        tokens, and those that hold drafts of other proposers too.
        """
        params = request.params
        if not self.scoring or params.proposer not in (None, self.drafter) or params.acceptance == "block":
            return None
        budget, sampled = Budget(depth, depth), params.temperature > 0
        history = self._acceptance.chances(request.drafter.history, self.drafter, budget, sampled)
        return history, [after / before if before else 0.0 for before, after in pairwise((1.0, *history))]

    def terms(self, request: Request, depth: int, deepest: int) -> list[float] | None:
        """Return what decides on a chain of at most `depth` tokens but their probabilities; None if it is not scored.

        These are b, the prices, and for each of `deepest` depths a logit(h) + d, then for each the probability by
        history that a token after a right one is right too.
        """
        histories = self._histories(request, depth)
        if histories is None or not depth:
            return None
        conditional, spare = histories[1], [0.0] * (deepest - depth)
        history, slope, constant = self._weights[request.params.temperature > 0]
        offsets = [history * logit(value) + constant for value in conditional]
        return [slope, *(self.prices or FREE), *offsets, *spare, *conditional[1:], 0.0, *spare]

    def record(self, request: Request, depth: int, log_probabilities: Sequence[float]) -> None:
        """Score the tokens of a chain of at most `depth`, from their log-probabilities, to learn from in `update`."""
        history, sampled = request.drafter.history, request.params.temperature > 0
        histories, history.scores = self._histories(request, depth), None
        if histories is None:
            return
        scores, emitted = list[Score](), 1.0
        for by_history, conditional, value in zip(*histories, log_probabilities, strict=False):
            features = (logit(conditional), logit(math.exp(value)), 1.0)
            weighted = (weight * each for weight, each in zip(self._weights[sampled], features, strict=True))
            right = sigmoid(sum(weighted))
            emitted *= right
            scores.append(Score(features, right, emitted, by_history))
        history.scores = scores

    def update(self, history: History, sampled: bool, depth: int, accepted: int) -> float | None:
        """Learn that `accepted` of the first `depth` tokens of the request's chain were right.

        Returns how many had been expected, None if the chain was not scored.
        """
        scores, history.scores = history.scores, None
        if scores is None:
            return None
        for place, (features, right, chance, by_history) in enumerate(scores[:depth]):
            emitted = place < accepted
            self._tokens = DRAFTER_DECAY * self._tokens + 1
            self._error = DRAFTER_DECAY * self._error + (chance - emitted) ** 2
            self._plain_error = DRAFTER_DECAY * self._plain_error + (by_history - emitted) ** 2
            if place <= accepted:
                step, (a, b, d) = LEARNS * (emitted - right), self._weights[sampled]
                self._weights[sampled] = a + step * features[0], b + step * features[1], d + step
        return sum(score.emitted for score in scores[:depth])

    @property
    def errors(self) -> tuple[float, float] | None:
        """Recent Brier scores: mean squared errors of the probabilities, and of those by depth and history alone."""
        return (self._error / self._tokens, self._plain_error / self._tokens) if self._tokens else None
