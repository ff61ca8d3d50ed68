"""The interface of proposers, which draft tokens for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from infer.request import Request
from infer.speculation.tree import Budget, DraftTree
from kernels.attention import LayerShape


class Needs(NamedTuple):
    """What the engine provides for a proposer; fixed when the proposer is built."""

    aux_layers: tuple[int, ...] = ()  # hidden states of the target that `commit` takes as features
    kv_layers: tuple[LayerShape, ...] = ()  # its KV layers in the engine's pool, under the same block tables
    warm_up: int = 0  # tokens that must be committed after `start_tracking` before it can draft; 0 for hardly any


class Tracker:
    """Follows requests for a proposer that runs a model.

    It begins with `resume` if a request's first positions lie in cached pages, and with `start_tracking` if nothing is
    known of them. `commit` follows every target forward that added committed positions. `Proposer.release` ends it.
    """

    def resume(self, request: Request) -> None:
        """Track a request whose first `computed` positions lie in pages that another request has filled.

        `request.last_features` are the features of the last of these positions, or None if its slot is filled too.
        """

    def start_tracking(self, request: Request) -> None:
        """Track a request that was released or never committed, without features of earlier positions."""

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        """Take the target's features of the last `counts[b]` committed positions of each request.

        features `[sum(counts), len(aux_layers) * H]`. Called when `request.tokens` already holds the token after the
        last committed position.
        """

    def catch_up(self, request: Request) -> None:
        """Fill the proposer's KV layers for every committed position of the request."""

    def synced(self, request: Request) -> int:
        """Return for how many of the committed positions the proposer's KV layers are filled."""
        return request.computed

    def ready(self, request: Request) -> bool:
        """Return whether it can draft for the request; after `start_tracking` that may take a few commits."""
        return True


class Proposer:
    """Drafts tokens. What is not overridden is right for a chain drafter that runs no model."""

    name: str
    needs: Needs = Needs()
    self_limiting = False  # whether it ends a chain where that becomes unlikely

    @property
    def tracker(self) -> Tracker | None:
        """What follows requests so that it can draft for them; None if drafts depend on a request's tokens alone."""
        return None

    def places(self, budget: Budget) -> int:
        """Return how many places past the root a draft under this budget writes to or proposes.

        Pages are reserved for them.
        """
        return budget.depth

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        """Return one tree per request: the root and at most `budgets[b]` drafted nodes, which is one or more.

        `request.tokens` ends with the root, and all positions before the root have been committed. Called again,
        request by request, if it raised for several at once. The tree of a smaller budget should consist of the first
        nodes of the tree of a larger one: the acceptance model learns a node's acceptance rate by its index
        (infer/speculation/control/acceptance_model.py).
        """
        raise NotImplementedError

    def release(self, request: Request) -> None:
        """Drop the state kept for a request, which has ended, was pre-empted or is not drafted for any more."""


class EstimatingProposer(Proposer):
    """One that knows how likely each of its drafts is to be accepted."""

    def chances(self, request: Request) -> Sequence[float]:
        """Return the probability of each node drafted last for the request to be accepted."""
        raise NotImplementedError


class NoProposer(Proposer):
    """Plain decoding: trees of one node."""

    name = "none"

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        return DraftTree.chains([request.tokens[-1] for request in requests], [()] * len(requests))
