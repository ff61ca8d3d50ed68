"""Suffix decoding (arXiv 2411.04975): drafts what followed earlier occurrences of the text's suffix.

Every suffix that occurred before, in the request's prompt and output or in earlier responses of the same tenant, has a
draft: what most often followed it. So has a copy that an edit interrupts: what follows the place where it left off. The
draft with the most expected tokens is proposed. How likely a token is to be accepted follows from its share of what
followed, and from how often tokens after matches of that length were right, in this request and in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infer.batch.tree import Budget, DraftTree
from infer.request import Proposer, ProposerState, Request
from infer.speculation.proposers.suffix_decoding.drafts import USUAL_DECAY, CopyRates
from infer.speculation.proposers.suffix_decoding.responses import EarlierResponses, Generation
from infer.speculation.proposers.suffix_decoding.sources import CopySource, Earlier, Interrupted, Text
from infer.speculation.proposers.tenants import PerTenant

READ_BACK = 64  # tokens of a prompt that are matched with earlier responses: few matches are longer


class UsualRates:
    """How copies from each kind of source went, in all requests of a tenant."""

    def __init__(self) -> None:
        self.text, self.earlier, self.interrupted = (CopyRates(USUAL_DECAY) for _ in range(3))


@dataclass
class Sources(ProposerState):
    """What one request's drafts are copied from, and `responses`, to which its own is added."""

    text: Text
    interrupted: Interrupted
    responses: EarlierResponses
    earlier: dict[Generation, Earlier] = field(default_factory=dict)
    read: int = 0  # tokens of the request that were read
    chances: list[float] = field(default_factory=list)  # of each token of its last draft to be accepted

    @property
    def automata(self) -> tuple[CopySource, ...]:
        return (self.text, *self.earlier.values())

    def end(self, request: Request) -> None:
        # Responses are kept only of requests that were drafted for, since adding one costs milliseconds.
        if self.read and request.finish_reason in ("stop", "length"):
            self.responses.add(request.params.cache_salt, request.output_ids)


class SuffixProposer(Proposer):
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

    def begin(self, request: Request) -> Sources:
        usual = self._usual.of(request)
        return Sources(Text(usual.text), Interrupted(usual.interrupted), self._responses)

    def propose(self, requests: Sequence[Request], states: Sequence[Sources], budgets: Sequence[Budget]) -> DraftTree:
        triples = zip(requests, states, budgets, strict=True)
        drafts = [self._draft(request, sources, budget.depth) for request, sources, budget in triples]
        return DraftTree.chains([request.tokens[-1] for request in requests], drafts)

    def _draft(self, request: Request, sources: Sources, depth: int) -> list[int]:
        self._read(request, sources)
        most = depth if self._max_depth is None else min(depth, self._max_depth)
        drafts = [source.draft(most, self._min_probability, self._factor) for source in sources.automata]
        drafts.append(sources.interrupted.draft(request.tokens, most, self._min_probability))
        tokens, sources.chances = max(drafts, key=lambda draft: draft.expected)
        return tokens

    def _read(self, request: Request, sources: Sources) -> None:
        """Read the request's new tokens, and what its tenant's newest generations of responses are."""
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

    def _matched(self, generation: Generation, request: Request) -> Earlier:
        earlier = Earlier(generation.automaton, self._usual.of(request).earlier)
        for token in request.tokens[-READ_BACK:]:
            earlier.extend(token)
        return earlier
