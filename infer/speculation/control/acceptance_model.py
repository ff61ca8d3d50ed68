"""Acceptance model: the probability that a drafted token is emitted, learnt per request and per drafter.

Chains by depth: depth j is reached if every shallower draft of the path was right, so the probability that a draft is
accepted down to it is the product of the conditional acceptance rates. Trees by rank: nodes are in the order of their
drafter's scores, and how often the r-th of them was on the accepted path tells what a tree of any size yields. So it
does for chains that their drafter ends where they become unlikely: only sure ones are long.

Each rate is a share of recent hits. A request's rates are shrunk towards its drafter's, and these towards what training
measured. Greedy and sampled drafts have separate evidence, since sampled tokens are predicted less often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from infer.batch.history import Evidence, History, Rates
from infer.batch.tree import Budget, VerifiedDraft, candidate_budgets

# Conditional acceptance rate of a drafter without evidence: as likely right as wrong.
UNKNOWN = 0.5
# Decay of evidence per draft: a request's content changes within some 30 drafts; a drafter's rate is that of some 200,
# of many requests. With 100 for either, useless drafts cost up to 5 % (tests/judge_controller.py).
REQUEST_DECAY, DRAFTER_DECAY = 0.97, 0.995


class AcceptanceModel:
    """The acceptance model of all requests.

    `priors`: by drafter, the conditional acceptance rates by depth that training measured on greedy drafts.
    `self_limiting`: the drafters that end a chain where it becomes unlikely.
    """

    def __init__(self, priors: Mapping[str, Sequence[float]] | None = None) -> None:
        self._priors = dict(priors or {})
        self.self_limiting: frozenset[str] = frozenset()
        self._drafters: dict[Evidence, Rates] = {}
        self._expected = self._emitted = 0.0

    def _evidence(self, drafter: str, sampled: bool, budget: Budget) -> Evidence:
        return Evidence(drafter, sampled, budget.is_chain and drafter not in self.self_limiting)

    def record(
        self, history: History, drafter: str, draft: VerifiedDraft, expected: float, sampled: bool = False
    ) -> None:
        """Record the outcome of a request's draft, of which `expected` tokens had been expected to be accepted."""
        key, accepted = self._evidence(drafter, sampled, draft.budget), len(draft.path)
        tried, path = draft.nodes, draft.path
        if key.chain:
            tried, path = min(draft.depth, accepted + 1), range(1, accepted + 1)
        self._drafters.setdefault(key, Rates(DRAFTER_DECAY)).record(tried, path)
        history.rates.setdefault(key, Rates(REQUEST_DECAY)).record(tried, path)
        self._expected = DRAFTER_DECAY * self._expected + expected
        self._emitted = DRAFTER_DECAY * self._emitted + accepted

    def gains(self, history: History, drafter: str, allowed: Budget, sampled: bool = False) -> dict[Budget, float]:
        """Return the expected number of accepted tokens by each of the `candidate_budgets` of what is allowed."""
        sums = [*accumulate(self.chances(history, drafter, allowed, sampled))]
        return {budget: sums[budget.nodes - 1] for budget in candidate_budgets(allowed)}

    def expected(self, history: History, drafter: str, draft: VerifiedDraft, sampled: bool = False) -> float:
        """Return how many tokens of this draft are expected to be accepted."""
        nodes = draft.depth if draft.budget.is_chain else draft.nodes
        return sum(self.chances(history, drafter, draft.budget, sampled)[:nodes])

    def chances(self, history: History, drafter: str, budget: Budget, sampled: bool = False) -> list[float]:
        """Return the probability that each node of a draft under this budget is accepted."""
        key = self._evidence(drafter, sampled, budget)
        measured = (() if sampled else self._priors.get(drafter, ())) or (UNKNOWN,)
        of_drafter, of_request = self._drafters.get(key), history.rates.get(key)
        rates: list[float] = []
        for place in range(budget.nodes):
            if key.chain:
                prior = measured[min(place, len(measured) - 1)]
            elif place and drafter in self.self_limiting:  # it goes on only while it is as sure
                prior = rates[-1]
            else:  # by Zipf's law from one rank to the next
                prior = rates[-1] * place / (place + 1) if place else measured[0]
            rates.append(of_drafter.rate(place, prior) if of_drafter else prior)
        if of_request is not None:
            rates = [of_request.rate(place, rate) for place, rate in enumerate(rates)]
        return [*accumulate(rates, mul)] if key.chain else rates

    @property
    def bias(self) -> float:
        """Calibration: recently accepted tokens over expected ones; below 1, expectations were too high."""
        return self._emitted / self._expected if self._expected else 1.0
