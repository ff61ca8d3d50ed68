"""One HTTP request on its way through the engine: its choices, their text, its deadline, its usage and its latencies.

Shared by completions and chats, streaming or not, so that all of them show the same text. Knows no wire format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.request import FinishReason, SamplingParams, StepOutput
from infer.server.errors import ApiError
from infer.server.metrics import Metrics
from infer.server.runtime import Generation
from models.tokenizer import DetokenizeStream


@dataclass
class Choice:
    index: int
    stream: DetokenizeStream
    text: str = ""
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)  # the one that stopped the generation included
    drafted: int = 0
    accepted: int = 0
    last_output: float | None = None

    def take(self, output: StepOutput) -> str:
        """The new text. The token that stopped the generation counts as a token and is no text."""
        self.token_ids += output.token_ids
        piece = self.stream.push(output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids)
        if output.finish_reason is not None:
            piece += self.stream.flush()
            self.finish_reason = output.finish_reason
            # Only now: until the last output the engine's thread goes on counting in it.
            self.drafted, self.accepted = output.stats.drafted, output.stats.accepted
        self.text += piece
        return piece


class Session:
    """`close` must be called in any case; it aborts whatever has not finished."""

    def __init__(
        self,
        generation: Generation,
        streams: Sequence[DetokenizeStream],
        *,
        prompt_tokens: int,
        params: SamplingParams,
        metrics: Metrics,
        speculative: bool,
        arrival: float,
        timeout: float,
    ) -> None:
        self.choices = [Choice(index, stream) for index, stream in enumerate(streams)]
        self.seed = params.seed
        self._generation, self._prompt_tokens = generation, prompt_tokens
        self._metrics, self._speculative = metrics, speculative
        self._arrival, self._timeout = arrival, timeout

    @property
    def finished(self) -> bool:
        return self._generation.finished

    async def next(self) -> tuple[Choice, str]:
        """The next piece of any choice; it may be empty. Raises ApiError for a failed or late request."""
        try:
            async with asyncio.timeout(self._arrival + self._timeout - time.monotonic()):
                index, output = await self._generation.next()
        except TimeoutError:
            message = f"not finished within server.request_timeout_s={self._timeout:g}"
            raise ApiError(504, message, code="timeout") from None
        choice = self.choices[index]
        piece = choice.take(output)
        self._observe(choice)
        return choice, piece

    def close(self) -> None:
        if aborted := self._generation.close():
            self._metrics.finished("abort", aborted)

    @property
    def usage(self) -> dict[str, Any]:
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
        }
        if self._speculative:
            accepted = sum(choice.accepted for choice in self.choices)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(choice.drafted for choice in self.choices) - accepted,
            }
        return usage

    def _observe(self, choice: Choice) -> None:
        now = time.monotonic()
        if choice.last_output is None:
            self._metrics.first_token.observe(now - self._arrival)
        else:
            self._metrics.between.observe(now - choice.last_output)
        choice.last_output = now
        if choice.finish_reason is not None:
            self._metrics.request.observe(now - self._arrival)
            self._metrics.finished(choice.finish_reason)
