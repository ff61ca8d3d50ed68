"""The interface of proposers, which draft tokens for the engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infer.kvcache.tensors import LayerShape
from infer.request import Request
from infer.speculation.budget import Budget
from infer.speculation.tree import DraftTree


class Proposer:
    """Drafts tokens. For a running request the engine calls, in this order:

    `commit` after every target forward that added committed positions, with the target's features of exactly those
    rows; `propose` before a verify, when `request.tokens` ends with the root and the features of all positions before
    the root have been committed (called again, request by request, if it raised for several at once); `release` once,
    when the request finishes, is aborted or is pre-empted.

    What is not overridden is right for a chain drafter that reads no features and keeps no KV in the pool.
    """

    name: str
    aux_layers: tuple[int, ...] = ()  # hidden states of the target that `commit` takes; () for none
    kv_layers: tuple[LayerShape, ...] = ()  # its KV layers in the engine's pool, under the same block tables
    warm_up: int = 0  # tokens that must be committed after `start_tracking` before it can draft; 0 for hardly any

    @property
    def keeps_state(self) -> bool:
        """Whether it reads features or fills KV layers: it runs a model, which has to follow every request."""
        return bool(self.aux_layers or self.kv_layers)

    def places(self, budget: Budget) -> int:
        """Return how many places past the root a draft under this budget writes to or proposes.

        Pages are reserved for them.
        """
        return budget.depth

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        """Return one tree per request: the root and at most `budgets[b]` drafted nodes, which is one or more.

        The tree of a smaller budget should consist of the first nodes of the tree of a larger one: the acceptance
        model learns a node's acceptance rate by its index (infer/speculation/control/acceptance_model.py).
        """
        raise NotImplementedError

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        """Take the target's features of the last `counts[b]` committed positions of each request.

        features `[sum(counts), len(aux_layers) * H]`. Called when `request.tokens` already holds the token after the
        last committed position.
        """

    def synced(self, request: Request) -> int:
        """Return for how many of the committed positions the proposer's KV layers are filled."""
        return request.computed

    def resume(self, request: Request) -> None:
        """Start a request whose first `computed` positions lie in pages that another request has filled.

        `request.last_features` are the features of the last of these positions, or None if its slot is filled too.
        """

    def release(self, request: Request) -> None:
        """Drop the state kept for a request."""

    def catch_up(self, request: Request) -> None:
        """Fill the proposer's KV layers for every committed position of the request."""

    def start_tracking(self, request: Request) -> None:
        """Start tracking a request that was released or never committed, without features of earlier positions."""

    def ready(self, request: Request) -> bool:
        """Return whether it can draft for the request; after `start_tracking` that may take a few commits."""
        return True


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
