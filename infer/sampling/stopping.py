"""Stop conditions: which of a step's tokens are emitted, and why a request finishes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from infer.sampling.logits_processors import is_forbidden, masks_of
from models.tokenizer import DetokenizeStream

if TYPE_CHECKING:
    from infer.request import Request

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


class StopStrings:
    """Finds stop strings in streamed text, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Return the text that is now final, without the stop string, and the stop string that ended it, or None."""
        text = self._held + piece
        matches = [(place, -len(stop), stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if matches:
            place, _, stop = min(matches)  # the earliest; of several at one place the longest
            self._held = ""
            return text[:place], stop
        self._held = text[len(text) - self._undecided(text) :]
        return text[: len(text) - len(self._held)], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that begins a stop string without completing it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class StopText:
    """Detokenises one request's output token by token, and finds its stop strings."""

    def __init__(self, stream: DetokenizeStream, stops: Sequence[str]) -> None:
        self._stream, self._strings = stream, StopStrings(stops)
        self.text = ""  # up to the stop string once one was found; without held-back text, which may begin one
        self.decoded = 0  # characters of the text, held-back text included
        self.stop: str | None = None

    def push(self, token: int, *, heed: bool) -> bool:
        """Append a token; return whether its text completes a stop string. Without `heed` stop strings are ignored."""
        piece = self._stream.push([token])
        self.decoded += len(piece)
        if heed:
            piece, self.stop = self._strings.push(piece)
        self.text += piece
        return self.stop is not None

    def finish(self) -> str:
        """Return the whole text; for a request that did not end at a stop string, flushes what is held back."""
        if self.stop is None:
            piece, self.stop = self._strings.push(self._stream.flush())
            self.text += piece + self._strings.flush()
        return self.text


def cut(
    tokens: Sequence[int], request: Request, *, room: int
) -> tuple[list[int], Literal["stop", "length", "error"] | None, int | str | None]:
    """Return the tokens of `tokens` to emit, the finish reason or None, and the stop id or stop string that matched.
    For the stop id `eos_id`, and for a grammar after which nothing may follow, the latter is None, as in vLLM.

    Tokens after a stop, or beyond `room`, are cut. Before `min_tokens` stop strings are ignored (stop ids cannot occur
    there: they are masked). A token that is forbidden was sampled where the request's masks together allow none: it is
    not emitted, and the request ends with an error, which becomes its `error`.
    """
    emitted: list[int] = []
    for token in tokens[:room]:
        request.error, ended = consume(request, emitted, token)
        if request.error is not None:
            return emitted, "error", None
        emitted.append(token)
        if token in request.stop_ids:
            return emitted, "stop", None if token == request.eos_id else token
        heed = request.output_length + len(emitted) >= request.params.min_tokens
        if request.stop_text is not None and request.stop_text.push(token, heed=heed):
            return emitted, "stop", request.stop_text.stop
        if ended:
            return emitted, "stop", None
    return emitted, "length" if len(emitted) == room else None, None


def consume(request: Request, emitted: Sequence[int], token: int) -> tuple[str | None, bool]:
    """Advance the request's grammar by a token after `emitted`.

    Returns why the token may not follow, or None, and whether the grammar ends with it.
    """
    constraint = request.constraint
    if request.rule != "synthetic" and is_forbidden(request, emitted, token):
        return f"no token can follow: {masks_of(request)} together allow none", False
    ended = constraint is not None and constraint.push(token)
    return constraint and constraint.error, ended
