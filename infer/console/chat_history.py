"""The history of a conversation with one user, truncated to fit the target's context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.chat import Message

Render = Callable[[Sequence[Message]], list[int]]  # the prompt's ids up to the assistant's next turn
# Fraction of the room to fill once turns are dropped, so that not every further turn drops some, which each time means
# a prefill of all that is left.
KEPT = 0.75


@dataclass
class Turn:
    """A message and its answer, with `prompt_ids` and `token_ids` of the request that generated it."""

    message: str
    answer: str
    prompt_ids: list[int]
    token_ids: list[int]
    whole: bool = True  # False: the user stopped the answer


@dataclass
class Dialogue:
    system: str | None = None
    turns: list[Turn] = field(default_factory=list[Turn])

    def messages(self, message: str) -> list[dict[str, Any]]:
        """Return the conversation with one more user message."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.message})
            messages.append({"role": "assistant", "content": turn.answer})
        return [*messages, {"role": "user", "content": message}]

    def prompt(self, message: str, render: Render, room: int) -> tuple[list[int], int]:
        """Return the prompt's ids, at most `room` of them, and how many of the oldest turns were dropped to fit.

        Raises ValueError for a message that is too long even without history, and where the template rejects a message;
        then nothing is dropped.
        """
        ids = render(self.messages(message))
        if len(ids) <= room:
            return ids, 0
        for dropped in range(1, len(self.turns) + 1):
            later = Dialogue(self.system, self.turns[dropped:])
            ids = render(later.messages(message))
            if len(ids) <= KEPT * room or (len(ids) <= room and not later.turns):
                self.turns = later.turns
                return ids, dropped
        raise ValueError(f"the message is too long: {len(ids)} tokens where the context leaves room for {room}")
