"""When a request ends: which of the tokens a step offers it are emitted, and why it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from infer.sampling.constraint import Constraint
from models.tokenizer import DetokenizeStream

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


class StopStrings:
    """Looks for stop strings in a text that comes in pieces, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """The text that is now certain, without the stop string, and the stop string that ended it if one did."""
        text = self._held + piece
        found = [(place, -len(stop), stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, _, stop = min(found)  # the earliest, of these the longest
            self._held = ""
            return text[:place], stop
        self._held = text[len(text) - self._undecided(text) :]
        return text[: len(text) - len(self._held)], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class StopText:
    """One request's text, token by token, for finding its stop strings."""

    def __init__(self, stream: DetokenizeStream, stops: Sequence[str]) -> None:
        self._stream, self._strings = stream, StopStrings(stops)
        self.text = ""  # up to the stop string once one was found; what may begin one is not in it yet
        self.decoded = 0  # characters of the text with what is held back
        self.stop: str | None = None

    def push(self, token: int, *, heed: bool) -> bool:
        """Whether the text ends with this token. Without `heed` it does not, whatever it says."""
        piece = self._stream.push([token])
        self.decoded += len(piece)
        if heed:
            piece, self.stop = self._strings.push(piece)
        self.text += piece
        return self.stop is not None

    def finish(self) -> str:
        """The whole text of a request that ended otherwise."""
        if self.stop is None:
            piece, self.stop = self._strings.push(self._stream.flush())
            self.text += piece + self._strings.flush()
        return self.text


def cut(
    tokens: Sequence[int],
    *,
    room: int,
    stop_ids: frozenset[int],
    eos_id: int | None,
    emitted_before: int,
    min_tokens: int,
    text: StopText | None,
    constraint: Constraint | None = None,
) -> tuple[list[int], Literal["stop", "length", "error"] | None, int | str | None]:
    """The tokens that are emitted of `tokens`, the reason to finish or None, and the stop id or string that was met.
    The stop id `eos_id`, and a grammar after which nothing may follow, stop without either, as in vLLM.

    What follows a stop, or lies past `room`, is cut. Before `min_tokens` a stop string is no stop (stop ids cannot
    occur there: they are masked).
    """
    emitted: list[int] = []
    for token in tokens[:room]:
        emitted.append(token)
        if token in stop_ids:
            return emitted, "stop", None if token == eos_id else token
        if text is not None and text.push(token, heed=emitted_before + len(emitted) >= min_tokens):
            return emitted, "stop", text.stop
        if constraint is not None and constraint.push(token):
            return emitted, "stop" if constraint.error is None else "error", None
    return emitted, "length" if len(emitted) == room else None, None
