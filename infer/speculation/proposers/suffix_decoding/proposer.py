"""Suffix decoding (arXiv 2411.04975): drafts what followed earlier occurrences of the text's suffix.

Every suffix that occurred before, in the request's prompt and output or in earlier responses of the same tenant, has a
draft: what most often followed it. So has a copy that an edit interrupts: what follows the place where it left off. The
draft with the most expected tokens is proposed. How likely a token is to be accepted follows from its share of what
followed, and from how often tokens after matches of that length were right, in this request and in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infer.request import Request
from infer.speculation.proposers.base import EstimatingProposer
from infer.speculation.proposers.suffix_decoding.drafts import USUAL_DECAY, CopyRates
from infer.speculation.proposers.suffix_decoding.responses import EarlierResponses, Generation
from infer.speculation.proposers.suffix_decoding.sources import CopySource, Earlier, Interrupted, Text
from infer.speculation.proposers.tenants import PerTenant
from infer.speculation.tree import Budget, DraftTree

READ_BACK = 64  # tokens of a prompt that are matched with earlier responses: few matches are longer


class UsualRates:
    """How copies from each kind of source went, in all requests of a tenant."""

    def __init__(self) -> None:
        self.text, self.earlier, self.interrupted = (CopyRates(USUAL_DECAY) for _ in range(3))


@dataclass
class Sources:
    """What one request's drafts are copied from."""

    text: Text
    interrupted: Interrupted
    earlier: dict[Generation, Earlier] = field(default_factory=dict)
    read: int = 0  # tokens of the request that were read
    chances: list[float] = field(default_factory=list)  # of the tokens of its last draft

    @property
    def automata(self) -> tuple[CopySource, ...]:
        return (self.text, *self.earlier.values())


class SuffixProposer(EstimatingProposer):
    """Drafts chains; reads no features and keeps no KV.

    `max_depth`: most tokens of a draft; None: its budget. `factor`: most drafted tokens per matched token, None for
    any number. `min_probability`: of a drafted token to be accepted.
    """

    name = "suffix"
    self_limiting = True

    def __init__(
        self,
        responses: EarlierResponses,
        *,
        max_depth: int | None = None,
        factor: float | None = None,
        min_probability: float = 0.1,
    ) -> None:
        self._max_depth, self._factor, self._min_probability = max_depth, factor, min_probability
        self._responses = responses
        self._usual = PerTenant(UsualRates)
        self._sources: dict[str, Sources] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> DraftTree:
        drafts = [self._draft(request, budget.depth) for request, budget in zip(requests, budgets, strict=True)]
        return DraftTree.chains([request.tokens[-1] for request in requests], drafts)

    def chances(self, request: Request) -> Sequence[float]:
        return self._sources[request.request_id].chances

    def _draft(self, request: Request, depth: int) -> list[int]:
        sources = self._read(request)
        most = depth if self._max_depth is None else min(depth, self._max_depth)
        drafts = [source.draft(most, self._min_probability, self._factor) for source in sources.automata]
        drafts.append(sources.interrupted.draft(request.tokens, most, self._min_probability))
        tokens, sources.chances = max(drafts, key=lambda draft: draft.expected)
        return tokens

    def release(self, request: Request) -> None:
        sources = self._sources.pop(request.request_id, None)
        # Responses are kept only of requests that were drafted for, since adding one costs milliseconds.
        if sources is not None and request.finish_reason in ("stop", "length"):
            self._responses.add(request.params.cache_salt, request.output_ids)

    def _read(self, request: Request) -> Sources:
        """Read the request's new tokens, and what its tenant's newest generations of responses are."""
        sources = self._sources.get(request.request_id)
        if sources is None:
            usual = self._usual.of(request)
            sources = Sources(Text(usual.text), Interrupted(usual.interrupted))
            self._sources[request.request_id] = sources
        tokens, prompt = request.tokens, len(request.prompt_ids)
        for place in range(sources.read, len(tokens)):
            token = tokens[place]
            if place >= prompt:
                for source in sources.automata:
                    source.record(token)
                sources.interrupted.record(tokens, place)
            for source in sources.automata:
                source.extend(token)
            if place >= prompt:
                sources.interrupted.extend(tokens, place, sources.text.copied_from())
        sources.read = len(tokens)
        sources.earlier = {
            generation: sources.earlier.get(generation) or self._matched(generation, request)
            for generation in self._responses.of(request.params.cache_salt)
        }
        return sources

    def _matched(self, generation: Generation, request: Request) -> Earlier:
        earlier = Earlier(generation.automaton, self._usual.of(request).earlier)
        for token in request.tokens[-READ_BACK:]:
            earlier.extend(token)
        return earlier
