"""What waits to be sent to the trainer, which reads nothing while it computes."""

from __future__ import annotations

import threading
from collections import deque

from infer.learning.messages import Message
from infer.learning.traffic import Example

MOST_BYTES = 2**26  # of examples that wait; one may be larger
TENSORS = ("ids", "states", "top_ids", "top_log_probs")
FACTS = ("prompt", "first", "temperature", "seed")


def message_of(example: Example, number: int) -> Message:
    facts = {name: str(getattr(example, name)) for name in FACTS}
    tensors = {name: getattr(example, name) for name in TENSORS}
    return Message("example", tensors, {"number": str(number), **facts})


def bytes_of(example: Example) -> int:
    return sum(getattr(example, name).nbytes for name in TENSORS)


class Outbox:
    """The newest examples, and how many requests run. Who puts anything in never waits; the thread that sends does."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.dropped = 0  # examples, of which the oldest go first
        self._most, self._bytes, self._sent, self._closed = most_bytes, 0, 0, False
        self._examples = deque[Example]()
        self._running: int | None = None  # if it is to be said
        self._changed = threading.Condition()

    def add(self, example: Example) -> None:
        with self._changed:
            self._examples.append(example)
            self._bytes += bytes_of(example)
            while self._bytes > self._most and len(self._examples) > 1:
                self._bytes -= bytes_of(self._examples.popleft())
                self.dropped += 1
            self._changed.notify()

    def load(self, running: int) -> None:
        """Say how many requests run, in place of an earlier number that still waits."""
        with self._changed:
            self._running = running
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._examples.clear()
            self._changed.notify()

    def next(self) -> Message | None:
        """Wait for the next message to send; None once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._examples or self._running is not None)
            if self._closed:
                return None
            if self._running is not None:
                running, self._running = self._running, None
                return Message("load", {}, {"running": str(running)})
            example = self._examples.popleft()
            self._bytes -= bytes_of(example)
            self._sent += 1
            return message_of(example, self._sent)
