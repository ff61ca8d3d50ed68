"""A request in the engine, what drafts for it, and its outputs. Token ids only; the caller makes text of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from infer.batch.constraint import Constraint
from infer.batch.history import History
from infer.batch.logprobs import TokenLogprob
from infer.batch.params import SamplingParams
from infer.batch.stopping import FinishReason, StopText
from infer.batch.token_counts import TokenCounts
from infer.batch.tree import NOTHING, Budget, DraftTree
from kernels.attention import LayerShape


@dataclass
class SpeculationStats:
    """Counts over verify steps. `emitted` counts the tokens that they emitted, bonus tokens included."""

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verify (tau), bonus token included; plain decoding has 1.0."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Acceptance rate by depth: of drafts that deep, the share with an accepted node at it (unconditional)."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    def record(self, *, drafted: int, accepted: int, emitted: int, depth: int | None = None) -> None:
        """Count one verify of a request: `drafted` nodes down to `depth` (default: a chain), `accepted` of them."""
        depth = drafted if depth is None else depth
        self.steps += 1
        self.emitted += emitted
        self.drafted += drafted
        self.accepted += accepted
        for counts, reached in ((self.drafted_by_position, depth), (self.accepted_by_position, accepted)):
            counts += [0] * (depth - len(counts))
            for position in range(reached):
                counts[position] += 1

    def merge(self, other: SpeculationStats) -> None:
        self.steps += other.steps
        self.emitted += other.emitted
        self.drafted += other.drafted
        self.accepted += other.accepted
        for counts, other_counts in (
            (self.drafted_by_position, other.drafted_by_position),
            (self.accepted_by_position, other.accepted_by_position),
        ):
            counts += [0] * (len(other_counts) - len(counts))
            for depth, count in enumerate(other_counts):
                counts[depth] += count


class DrafterState(Enum):
    """How much of a request what its proposer keeps of it (features, KV) covers."""

    FULL = "full"
    NONE = "none"  # drafting does not pay now, so no position is followed
    PARTIAL = "partial"  # only tokens committed since tracking was started mid-sequence


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class PageKeys(Protocol):
    """Under which a request's full pages are cached."""

    def upto(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """Return the keys of the first `blocks` pages. `tokens` must extend those of the last call."""
        ...


class Needs(NamedTuple):
    """What the engine provides for a proposer, fixed when it is built; nothing for one that runs no model."""

    aux_layers: tuple[int, ...] = ()  # hidden states of the target that `commit` takes as features
    kv_layers: tuple[LayerShape, ...] = ()  # its KV layers in the engine's pool, under the same block tables
    warm_up: int = 0  # tokens that must be committed after a start within the text before it can draft; 0: hardly any

    @property
    def tracking(self) -> bool:
        """Whether the proposer must follow a request, by `commit`, to draft for it."""
        return bool(self.aux_layers or self.kv_layers)


class ProposerState:
    """What a proposer keeps of one request; the request's drafter holds it. This one keeps nothing."""

    def ready(self, request: Request) -> bool:
        """Return whether the proposer can draft now; after a start within the text that may take a few commits."""
        return True

    def synced(self, request: Request) -> int:
        """Return for how many of the committed positions the proposer's KV layers are filled."""
        return request.computed

    def end(self, request: Request) -> None:
        """Take note that the request has ended."""


class Proposer:
    """Drafts tokens. What is not overridden is right for a chain drafter that runs no model and keeps nothing.

    The states that it is handed are those that its `begin` returned for these requests.
    """

    name: str
    needs: Needs = Needs()
    # Whether it knows how likely each token of a draft is to be accepted (`chances` of its states), and ends a chain
    # where that becomes unlikely.
    self_limiting = False

    def begin(self, request: Request) -> ProposerState:
        """Return the state of a request of which nothing is kept.

        If positions are committed already, `request.drafter.state` says whether the proposer's KV layers are filled for
        them: by another request in cached pages (FULL), where `request.last_features` are the features of the last one,
        or None if its slot is filled too; or not at all (PARTIAL), and their features are lost.
        """
        return ProposerState()

    def places(self, budget: Budget) -> int:
        """Return how many places past the root a draft under this budget writes to or proposes.

        Pages are reserved for them.
        """
        return budget.depth

    def propose(self, requests: Sequence[Request], states: Sequence[Any], budgets: Sequence[Budget]) -> DraftTree:
        """Return one tree per request: the root and at most `budgets[b]` drafted nodes, which is one or more.

        `request.tokens` ends with the root, and all positions before the root have been committed. Called again,
        request by request, if it raised for several at once. The tree of a smaller budget should consist of the first
        nodes of the tree of a larger one: the acceptance model learns a node's acceptance rate by its index
        (infer/speculation/control/acceptance_model.py).
        """
        raise NotImplementedError

    def commit(self, requests: Sequence[Request], states: Sequence[Any], features: Sequence[Tensor]) -> None:
        """Take the target's features of the last committed positions of each request, if it needs tracking.

        features[b] `[n, len(aux_layers) * H]`, of n positions. Follows every target forward that added committed
        positions, when `request.tokens` already holds the token after the last one.
        """

    def catch_up(self, request: Request, state: Any) -> None:
        """Fill the proposer's KV layers for every committed position of the request."""


class NoProposer(Proposer):
    """Plain decoding: trees of one node."""

    name = "none"

    def propose(self, requests: Sequence[Request], states: Sequence[Any], budgets: Sequence[Budget]) -> DraftTree:
        return DraftTree.chains([request.tokens[-1] for request in requests], [()] * len(requests))


PLAIN = NoProposer()


@dataclass(eq=False)
class Drafter:
    """A request's proposer, the largest budget that it drafts under in a step, and what it keeps of the request.

    `state` is FULL from the first position on, unless the speculator decides otherwise before admission or starts or
    stops tracking. It stays FULL if the proposer needs no tracking.
    """

    proposer: Proposer = PLAIN
    limit: Budget = NOTHING
    context: int = 0  # most tokens of the request
    state: DrafterState = DrafterState.FULL
    kept: Any = field(default_factory=ProposerState)  # made by the proposer
    history: History = field(default_factory=History)
    idle: int = 0  # steps without drafts in a row, while the request is tracked

    @property
    def name(self) -> str:
        return self.proposer.name

    @property
    def tracks(self) -> bool:
        return self.state is not DrafterState.NONE

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads of the request now."""
        return self.proposer.needs.aux_layers if self.tracks else ()

    def begin(self, request: Request) -> None:
        """Drop what is kept of the request, and begin anew with what `state` covers."""
        self.idle = 0
        self.kept = self.proposer.begin(request)

    def ready(self, request: Request) -> bool:
        """Return whether it can draft now."""
        return self.tracks and self.kept.ready(request)

    def synced(self, request: Request) -> int:
        """Return how many committed positions are filled in all layers that the request's pages are keyed by."""
        return self.kept.synced(request) if self.state is DrafterState.FULL else request.computed

    def places(self, budget: Budget) -> int:
        """Return how many places past the root a draft under this budget takes in the pool."""
        return self.proposer.places(budget) if budget.nodes else 0

    def steady_budget(self, request: Request) -> Budget:
        """Return the request's largest budget for as long as its end is far."""
        return self._within(request.params.max_draft_tokens)

    def budget(self, request: Request) -> Budget:
        """Return its largest budget: no deeper than the tokens that it may still emit before the bonus token."""
        room = min(request.remaining, self.context - len(request.tokens)) - 1
        requested = request.params.max_draft_tokens
        return self._within(room if requested is None else min(room, requested))

    def _within(self, depth: int | None) -> Budget:
        nodes, deepest = self.limit
        depth = deepest if depth is None else max(0, min(deepest, depth))
        return NOTHING if depth == 0 else Budget(depth if self.limit.is_chain else nodes, depth)


@dataclass(eq=False)
class Request:
    """One request inside the engine, compared by identity.

    `computed` counts the positions whose KV is committed. In decode it is `len(tokens) - 1`: the last token is the
    root of the next draft tree, and its KV is written by the verify.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    tokens: list[int]  # prompt and output
    stop_ids: frozenset[int] = frozenset()  # `stop_token_ids` and, unless `ignore_eos`, the end tokens
    eos_id: int | None = None  # the tokenizer's eos_token: the only stop id that is not reported as `stop_reason`
    computed: int = 0
    phase: Phase = Phase.WAITING
    table_row: int = -1  # of the block table, while running
    pages: list[int] = field(default_factory=list)
    drafter: Drafter = field(default_factory=Drafter)
    keys: PageKeys | None = None  # keys of its pages; None: they are not shared
    plain_keys: PageKeys | None = None  # keys of pages of which only the target's layers are filled
    published: int = 0  # positions whose pages were published or adopted
    page_ends: dict[int, Tensor] = field(
        default_factory=dict
    )  # features by position, of those that end a page; published with it
    last_features: Tensor | None = None  # features of position `computed - 1`, if it began with cached pages
    # Of a hybrid target: cached positions of its pages, of which it began with those that a snapshot covers; slots of
    # copies of its state, by the position that they are of, to be published; key of the last one of its answer
    matched: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)
    last_snapshot: bytes | None = None
    parent: Request | None = None  # with n > 1: the request that computes the common prompt
    arrival: int = 0  # order in which requests came
    added: float = 0.0  # time of arrival on the engine's clock
    queued_s: float | None = None  # seconds from its arrival to its first rows
    cached: int = 0  # positions of the prompt computed by another request
    deadline: float | None = None  # on the engine's clock
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    rule: str = "exact"  # acceptance rule of its drafts (infer/speculation/verify.py)
    counts: TokenCounts | None = None  # for penalties
    stop_text: StopText | None = None  # for stop strings
    constraint: Constraint | None = None  # for a grammar
    failed: bool = False  # its work raised an exception (infer/sampling/isolation.py); it ends in this step
    error: str | None = None  # why no token can follow, with the finish reason "error"
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output, if requested
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt from its second token on
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id, unless it is `eos_id`, or the stop string

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    @property
    def ended_by_token(self) -> bool:
        """Return whether a stop token ended the request; that token is not part of its text."""
        return self.finish_reason == "stop" and self.tokens[-1] in self.stop_ids

    @property
    def output_length(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def remaining(self) -> int:
        return self.params.max_tokens - self.output_length

    @property
    def lookup_keys(self) -> list[PageKeys]:
        """Return the keys under which pages that it can use may be cached."""
        chains = [self.keys] if self.drafter.state is DrafterState.FULL else [self.keys, self.plain_keys]
        return [keys for keys in chains if keys is not None]

    @property
    def publish_keys(self) -> PageKeys | None:
        """Return the keys that say which layers of its pages are filled; None if they are not shared."""
        return self.keys if self.drafter.state is DrafterState.FULL else self.plain_keys

    def preempt(self) -> None:
        """Wait again, to be recomputed from its tokens. What a drafter keeps of a part of it is then worth nothing."""
        self.phase, self.computed = Phase.WAITING, 0
        if self.drafter.state is DrafterState.PARTIAL:
            self.drafter.state = DrafterState.NONE

    def is_late(self, now: float) -> bool:
        """Return whether its deadline has passed at `now` on the engine's clock."""
        return self.deadline is not None and now > self.deadline


@dataclass
class StepOutput:
    """Output of a step for one request. `accepted[i]`: token i was an accepted draft. `stats` is live, not a copy."""

    request_id: str
    token_ids: list[int]
    accepted: list[bool]
    stats: SpeculationStats
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    ended_by_token: bool = False  # the last token is not part of the text
    error: str | None = None  # with the finish reason "error"
    internal: bool = False  # the error is an exception in the engine, not the fault of the request
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, if requested
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # with the first output, if requested
    cached_tokens: int = 0  # of the prompt, computed for an earlier request
    queued_s: float = 0.0  # seconds from its arrival to its first rows


@dataclass
class Completion:
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None  # continues the prompt's text; without the stop token or stop string
    finish_reason: FinishReason
    seed: int
    stats: SpeculationStats
    stop_reason: int | str | None = None  # as in vLLM: a stop string, or the stop token unless it is the eos_token
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    acceptance: str = "exact"  # acceptance rule of drafts: exact, block, typical or synthetic
    error: str | None = None  # with the finish reason "error": why no token could follow
