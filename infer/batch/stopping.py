"""Why requests finish, and stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from models.tokenizer import DetokenizeStream

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
    """Detokenizes one request's output token by token, and finds its stop strings."""

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
