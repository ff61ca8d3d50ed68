"""An answer as a list of items: text and reasoning, which grow, and calls. Anthropic's messages and OpenAI's responses.

The order of items and events is decided here; a subclass says what an item and its events look like.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

from infer.server.api.conversation import Conversation
from infer.server.api.rendering import Answer, Json
from infer.server.parsing.tool_styles import Call
from infer.server.session import Choice, Piece, Session, tokens_within

Kind = Literal["content", "reasoning"]


class ItemsAnswer(Answer):
    """The answer of a session with one choice. `items`: those so far, of which the last one may still grow."""

    def __init__(self, session: Session, conversation: Conversation) -> None:
        self._session, self._conversation = session, conversation
        (self._choice,) = session.choices
        self._parser = conversation.parser()
        self._open: Kind | None = None  # the kind of the last item, while it grows
        self.items: list[Json] = []

    @abstractmethod
    def begin(self, kind: Kind) -> Iterator[Json]:
        """Append an empty item and yield its first events."""

    @abstractmethod
    def grow(self, kind: Kind, text: str, piece: Piece) -> Iterator[Json]:
        """Append text to the last item and yield its events. `piece`: what the text came with."""

    @abstractmethod
    def end(self, kind: Kind, *, complete: bool) -> Iterator[Json]:
        """Yield the events that end the last item. `complete`: the answer was not truncated in it."""

    @abstractmethod
    def call(self, call: Call) -> Iterator[Json]:
        """Append a call and yield its events."""

    @abstractmethod
    def result(self) -> Json:
        """Return the document of the finished answer."""

    def document(self) -> Json:
        for _ in self.take(self._choice, self._choice.whole):
            pass
        return self.result()

    @property
    def reasoning_tokens(self) -> int:
        return tokens_within(self._choice.whole.tokens, self._parser.reasoning_span)

    def take(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        """Append what a piece holds, in the order in which the model wrote it, and yield the events."""
        reason = choice.finish_reason
        for part in self._parser.take(piece.text, reason).items:
            if isinstance(part, Call):
                yield from self._close()
                yield from self.call(part)
                continue
            if part.kind != self._open:
                yield from self._close()
                self._open = part.kind
                yield from self.begin(part.kind)
            yield from self.grow(part.kind, part.text, piece)
        if reason is not None:
            yield from self._close(complete=reason == "stop")

    def _close(self, *, complete: bool = True) -> Iterator[Json]:
        kind, self._open = self._open, None
        if kind is not None:
            yield from self.end(kind, complete=complete)
