"""The session of one HTTP request: its choices and their text, its deadline, usage and latencies.

Shared by all endpoints that generate, streaming or not, so that all return the same text. Independent of wire formats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.batch.logprobs import TokenLogprob
from infer.batch.stopping import StopText
from infer.request import FinishReason, SpeculationStats, StepOutput
from infer.sampling.emission import NAN
from infer.sampling.isolation import panics_as_errors
from infer.server.engine_loop import Event, Failure, is_last
from infer.server.metrics import Metrics
from infer.server.protocol.errors import ApiError, internal_error
from infer.server.protocol.logprobs import ScoredToken


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    text: str | None = None  # set if the prompt is to be echoed
    offsets: tuple[int, ...] = ()  # of its tokens, in characters of `text`
    unfinished: str = ""  # follows `text` if nothing is generated: U+FFFD for an incomplete character


@dataclass(frozen=True)
class ShownToken:
    """A token with the text it released: text is held back for an incomplete character or a possible stop string."""

    token: int
    text: str
    depth: int  # position in the draft at which it was accepted, from 1; 0: chosen by the target


@dataclass
class Piece:
    """What one output added to a choice, or what all of them added so far."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)  # with echo, the prompt's tokens too

    def add(self, other: Piece) -> None:
        self.text += other.text
        self.tokens += other.tokens
        self.scored += other.scored


def tokens_within(tokens: Sequence[ShownToken], span: tuple[int, int]) -> int:
    """Count the tokens that overlap the characters `span` = (first, last + 1) of their concatenated text."""
    count = place = 0
    for token in tokens:
        if place >= span[1]:
            break  # stop early: a stream calls this with every piece
        end = max(place + len(token.text), place + 1)  # a token that released no text counts as one character wide
        count += place < span[1] and end > span[0]
        place += len(token.text)
    return count


class Choice:
    """One choice of a response. `only_prompt`: drop the generated tokens and return the echoed prompt alone."""

    def __init__(self, index: int, prompt: Prompt, text: StopText, min_tokens: int, *, only_prompt: bool) -> None:
        self.index, self.prompt = index, prompt
        self.whole = Piece()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.stats = SpeculationStats()
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.last_output: float | None = None
        self._text, self._min_tokens, self._only_prompt = text, min_tokens, only_prompt
        self._began = False

    def take(self, output: StepOutput) -> Piece:
        """Add an output and return what is new. A stop token counts as a token but adds no text."""
        piece = Piece()
        if not self._began:
            self._begin(output, piece)
        if not self._only_prompt:
            self._take_tokens(output, piece)
        if output.finish_reason is not None:
            self.finish_reason = "length" if self._only_prompt else output.finish_reason
            self.stop_reason = None if self._only_prompt else output.stop_reason
            self.stats = output.stats  # only now: the engine's thread updates it until the last output
        self.whole.add(piece)
        return piece

    def _begin(self, output: StepOutput, piece: Piece) -> None:
        self._began = True
        self.cached_tokens, self.prompt_logprobs = output.cached_tokens, output.prompt_logprobs
        if self.prompt.text is None:
            return
        piece.text = self.prompt.text + (self.prompt.unfinished if self._only_prompt else "")
        if output.prompt_logprobs:
            places = zip(self.prompt.ids, self.prompt.offsets, [None, *output.prompt_logprobs], strict=True)
            piece.scored = [ScoredToken(*place) for place in places]

    def _take_tokens(self, output: StepOutput, piece: Piece) -> None:
        before, echoed = len(self._text.text), len(self.prompt.text or "")
        count = len(self.whole.tokens)
        for index, token in enumerate(output.token_ids):
            last = index == len(output.token_ids) - 1
            start, offset = len(self._text.text), echoed + self._text.decoded
            if not (last and output.ended_by_token):
                self._text.push(token, heed=count + index + 1 >= self._min_tokens)
            if last and output.finish_reason is not None:
                self._text.finish()
            depth = index + 1 if output.accepted[index] else 0
            piece.tokens.append(ShownToken(token, self._text.text[start:], depth))
            if output.logprobs:
                piece.scored.append(ScoredToken(token, offset, output.logprobs[index]))
        if not output.token_ids and output.finish_reason is not None:
            self._text.finish()
        piece.text += self._text.text[before:]


@dataclass(eq=False)
class Session:
    """The choices of one HTTP request. `close` must always be called; it aborts those that have not finished."""

    request_ids: Sequence[str]  # of the engine's requests, one per choice
    choices: list[Choice]
    outputs: asyncio.Queue[Event]
    abort: Callable[[str], bool]
    seed: int
    prompt_tokens: int  # of all prompts
    metrics: Metrics
    speculative: bool  # whether the request may be drafted for
    arrival: float  # of time.monotonic
    timeout: float  # seconds after it

    def __post_init__(self) -> None:
        self._unfinished = dict(zip(self.request_ids, self.choices, strict=True))

    @property
    def finished(self) -> bool:
        """Whether the last piece of every choice was returned."""
        return not self._unfinished

    async def next(self) -> tuple[Choice, Piece]:
        """Return the next piece of any choice; it may be empty. Raises ApiError if the request fails or times out."""
        try:
            async with asyncio.timeout(self.arrival + self.timeout - time.monotonic()):
                output = await self.outputs.get()
        except TimeoutError:
            message = f"not finished within {self.timeout:g} s (server.request_timeout_s or the request's timeout_s)"
            raise ApiError(504, message, code="timeout") from None
        choice = self._unfinished[output.request_id]
        if is_last(output):
            del self._unfinished[output.request_id]
        if isinstance(output, Failure):
            raise output.error
        if output.error is not None:
            self.metrics.finished("error")
            if output.error == NAN:
                raise ApiError(500, NAN, code="nan_logits")
            code = "grammar_failed" if output.error.startswith("the grammar") else "no_token_allowed"
            raise internal_error() if output.internal else ApiError(400, output.error, code=code)
        with panics_as_errors():
            piece = choice.take(output)
        self._observe(choice, output)
        return choice, piece

    def close(self) -> None:
        if aborted := sum(map(self.abort, self._unfinished)):
            self.metrics.finished("abort", aborted)

    def usage(self, reasoning_tokens: int | None = None) -> dict[str, Any]:
        """Return OpenAI's `usage` object. A prompt counts once, however many choices it has.

        The details are complete only when all choices have finished. `reasoning_tokens`: the sum over all choices,
        from the endpoint that parses reasoning.
        """
        completion_tokens = sum(len(choice.whole.tokens) for choice in self.choices)
        # hits of the prefix cache: a prompt's are those of its first choice
        cached = {id(choice.prompt): choice.cached_tokens for choice in reversed(self.choices)}
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }
        details: dict[str, int] = {}
        if reasoning_tokens is not None:
            details["reasoning_tokens"] = reasoning_tokens
        if self.speculative:
            stats = self._stats
            details["accepted_prediction_tokens"] = stats.accepted
            details["rejected_prediction_tokens"] = stats.drafted - stats.accepted
        return usage | ({"completion_tokens_details": details} if details else {})

    @property
    def speculation(self) -> dict[str, Any] | None:
        """vLLM's `metrics.speculative_decoding` over all choices, or None if the request does not speculate."""
        if not self.speculative:
            return None
        stats = self._stats
        histogram = [*stats.accepted_by_position, 0]
        reached = [stats.steps, *stats.accepted_by_position]
        return {
            "mean_acceptance_length": stats.acceptance_length,
            "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
            "acceptance_histogram": [more - fewer for more, fewer in zip(reached, histogram, strict=True)],
            "acceptance_rate_per_position": stats.acceptance_by_position,
            "num_spec_steps": stats.steps,
            "num_accepted_draft_tokens": stats.accepted,
            "num_draft_tokens": stats.drafted,
            "num_spec_tokens": len(stats.drafted_by_position),
        }

    @property
    def _stats(self) -> SpeculationStats:
        total = SpeculationStats()
        for choice in self.choices:
            total.merge(choice.stats)
        return total

    def _observe(self, choice: Choice, output: StepOutput) -> None:
        now = time.monotonic()
        if choice.last_output is None:
            self.metrics.first_token.observe(now - self.arrival)
            self.metrics.queue.observe(output.queued_s)
        else:
            self.metrics.between.observe(now - choice.last_output)
        choice.last_output = now
        if choice.finish_reason is not None:
            self.metrics.request.observe(now - self.arrival)
            self.metrics.finished(choice.finish_reason)
