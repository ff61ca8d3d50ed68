"""The history of a conversation with one person, and how it is kept within the target's context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.chat import Message

Render = Callable[[Sequence[Message]], list[int]]  # the prompt's ids up to the assistant's next turn
KEPT = 0.75  # of the room, once turns are dropped: not in every turn anew, each time reading all that is left


@dataclass
class Turn:
    """A message and its answer. `prompt_ids` and `token_ids` are those of the request that gave it."""

    message: str
    answer: str
    prompt_ids: list[int]
    token_ids: list[int]
    whole: bool = True  # False: the answer was stopped by its reader


@dataclass
class Dialogue:
    system: str | None = None
    turns: list[Turn] = field(default_factory=list[Turn])

    def messages(self, message: str) -> list[dict[str, Any]]:
        """The conversation with one more message of the user's."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.message})
            messages.append({"role": "assistant", "content": turn.answer})
        return [*messages, {"role": "user", "content": message}]

    def prompt(self, message: str, render: Render, room: int) -> tuple[list[int], int]:
        """The prompt's ids, `room` of them at most, and how many of the oldest turns were dropped for that.

        Raises ValueError for a message that is too long without any history, and where the template refuses a message;
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
