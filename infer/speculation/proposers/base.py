"""The proposer protocol: whatever drafts tokens for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from infer.kvcache.tensors import LayerShape
from infer.request import Request
from infer.speculation.budget import Budget
from infer.speculation.tree import DraftTree


class Proposer(Protocol):
    """Contract with the engine, in this order for a running request:

    `commit` after every target forward that added committed positions, with the target's features of exactly those
    rows; `propose` before a verify, when `request.tokens` ends with the root and features of all positions before the
    root have been committed (again, request by request, if it raised for several at once); `release` once, when the
    request finishes, is aborted or pre-empted.
    """

    name: str
    aux_layers: tuple[int, ...]  # hidden states of the target that `commit` wants; () for none
    kv_layers: tuple[LayerShape, ...]  # layers it keeps in the engine's pool, under the same block tables
    warm_up: int  # tokens that must be committed after `wake` until it can draft; 0 for hardly any

    def places(self, budget: Budget) -> int:
        """Places past the root that drafting under this budget writes to or proposes; pages are reserved for them."""
        ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        """A tree per request, root included, of at most `budgets[b]` drafted nodes (NOTHING = the root alone).

        Of a tree a smaller budget should hold the first nodes of what a larger one would: how much each brings is
        learnt by its place (infer/speculation/control/acceptance_model.py).
        """
        ...

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        """features `[sum(counts), len(aux_layers) * H]` of the last `counts[b]` committed positions of each request.

        Called when `request.tokens` already holds the token after the last committed position.
        """
        ...

    def synced(self, request: Request) -> int:
        """Of the committed positions, how many its own layers of the pool are filled for."""
        ...

    def resume(self, request: Request) -> None:
        """The request begins with pages filled by another one, over its first `computed` positions.

        `request.last_features` are those of the last of them, or None if its slot is filled too.
        """
        ...

    def release(self, request: Request) -> None: ...

    def catch_up(self, request: Request) -> None:
        """Fills its own layers for every committed position of the request."""
        ...

    def wake(self, request: Request) -> None:
        """Of the request, released or never committed, what is committed from now on is all there will be."""
        ...

    def ready(self, request: Request) -> bool:
        """Whether it can be asked to draft, which after `wake` may take a few commits."""
        ...


class WithoutLayers:
    """What a proposer that keeps nothing in the pool has to say about pages."""

    aux_layers: tuple[int, ...] = ()
    kv_layers: tuple[LayerShape, ...] = ()
    warm_up: int = 0

    def commit(self, requests: Sequence[Request], counts: Sequence[int], features: Tensor) -> None:
        pass

    def synced(self, request: Request) -> int:
        return request.computed

    def resume(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def catch_up(self, request: Request) -> None:
        pass

    def wake(self, request: Request) -> None:
        pass

    def ready(self, request: Request) -> bool:
        return True


class NoProposer(WithoutLayers):
    """Plain decoding: trees of one node."""

    name = "none"

    def places(self, budget: Budget) -> int:
        return 0

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        return DraftTree.chains([request.tokens[-1] for request in requests], [()] * len(requests))
