"""What drafts for one request, and how much of the request its state covers."""

from __future__ import annotations

import logging

from infer.request import DrafterState, DrafterView, Request
from infer.speculation.control.batch_plan import Candidate
from infer.speculation.proposers.base import Proposer, Tracker
from infer.speculation.tree import NOTHING, Budget

log = logging.getLogger(__name__)


class Drafter(DrafterView):
    """A request's proposer, the largest budget that it drafts under in a step, and the state of its tracker.

    `state` is FULL from the first position on, unless `start_tracking` or `stop_tracking` change it or the speculator
    decides otherwise before admission. Without a tracker it stays FULL. Verbs may raise what a proposer raises.
    """

    def __init__(self, proposer: Proposer, limit: Budget, context: int) -> None:
        self.proposer, self.limit, self._context, self._tracker = proposer, limit, context, proposer.tracker
        self.idle = 0  # steps without drafts in a row, while the request is tracked

    # ---- queries -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.proposer.name

    @property
    def tracks(self) -> bool:
        return self.state is not DrafterState.NONE

    @property
    def tracker(self) -> Tracker | None:
        """What keeps state of the request; None if nothing does, now or ever."""
        return self._tracker if self.state is not DrafterState.NONE else None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.proposer.needs.aux_layers if self.tracks else ()

    @property
    def filled_by(self) -> str:
        return self.name if self.proposer.needs.kv_layers else ""

    def synced(self, request: Request) -> int:
        full = self.tracker if self.state is DrafterState.FULL else None
        return request.computed if full is None else full.synced(request)

    def places(self, budget: Budget) -> int:
        return self.proposer.places(budget) if budget.nodes else 0

    def ready(self, request: Request) -> bool:
        """Return whether it can draft now."""
        return self.tracks and (self.tracker is None or self.tracker.ready(request))

    def steady_budget(self, request: Request) -> Budget:
        """Return the request's largest budget for as long as its end is far."""
        return self._within(request.params.max_draft_tokens)

    def budget(self, request: Request) -> Budget:
        """Return its largest budget: no deeper than the tokens that it may still emit before the bonus token."""
        room = min(request.remaining, self._context - len(request.tokens)) - 1
        requested = request.params.max_draft_tokens
        return self._within(room if requested is None else min(room, requested))

    def candidate(self, request: Request) -> Candidate:
        """Return what a plan of the next steps needs to know of the request."""
        warm_up = 0 if self.ready(request) else 1 + self.proposer.needs.warm_up
        sampled = request.params.temperature > 0
        return Candidate(request.request_id, self.name, self.budget(request), sampled, warm_up)

    def _within(self, depth: int | None) -> Budget:
        nodes, deepest = self.limit
        depth = deepest if depth is None else max(0, min(deepest, depth))
        return NOTHING if depth == 0 else Budget(depth if self.limit.is_chain else nodes, depth)

    # ---- verbs ---------------------------------------------------------------------------------------------------

    def resume(self, request: Request) -> None:
        """Adopt what cached pages hold of the request's first `computed` positions."""
        if self.tracker is not None and request.computed:
            self.tracker.resume(request)

    def start_tracking(self, request: Request) -> None:
        """Follow the request from here on."""
        self.state = DrafterState.PARTIAL
        if self.tracker is not None:
            self.tracker.start_tracking(request)

    def stop_tracking(self, request: Request) -> None:
        self.release(request)
        self.state = DrafterState.NONE

    def catch_up(self, request: Request) -> None:
        """Read all committed positions, if the request was tracked from the start."""
        if self.tracker is not None and self.state is DrafterState.FULL:
            self.tracker.catch_up(request)

    def release(self, request: Request) -> None:
        """Drop what is kept of the request. The request still ends if that fails."""
        self.idle = 0
        try:
            self.proposer.release(request)
        except Exception:
            log.exception("%s: proposer %s could not release its state", request.request_id, self.name)


def drafter_of(request: Request) -> Drafter:
    """Return the drafter that `Speculator.assign` chose."""
    assert isinstance(request.drafter, Drafter), f"{request.request_id}: has no drafter yet"
    return request.drafter
