"""Learning as the engine's thread sees it: between two steps examples go out, and a head that drafts better comes in.

Two other threads have the socket, one to send and one to read, so that no step waits for the trainer. No token depends
on any of this: verifying decides them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

from infer.engine import Engine
from infer.learning.candidates import read_candidate
from infer.learning.messages import Message, receive, send
from infer.learning.outbox import Outbox
from infer.learning.recording import recording
from infer.learning.status import TAUS, LearningStatus
from infer.learning.traffic import TrafficRecorder
from infer.learning.trainer import Trainer
from models.heads.base import Head

log = logging.getLogger("headway.server")


class LearningLoop:
    """Records `engine`, which is idle, and exchanges messages with `trainer`; `status` may be read from any thread.

    Waits until the trainer is ready. Raises ValueError for an engine without a head or with CUDA graphs, and for what
    the trainer refuses.
    """

    def __init__(self, engine: Engine, trainer: Trainer) -> None:
        if engine.head is None:
            raise ValueError(f"learn=true: proposer={engine.proposer_name} drafts with no head; say proposer=head")
        if engine.graphs is not None:
            raise ValueError("learn=true: CUDA graphs do not show what they compute; say engine.graphs=off")
        if receive(trainer.stream) is None:  # else its first status, which says nothing
            raise ValueError(f"learn=true: {trainer.why_ended()}")
        self.status = LearningStatus()
        self._engine, self._trainer, self._outbox = engine, trainer, Outbox()
        self._recorder = TrafficRecorder(engine.head.config.aux_layers, lambda request: request.params.learn)
        self._recording, self._running = ExitStack(), 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # what messages ask of this thread
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._read)]
        for thread in self._threads:
            thread.start()
        self._record()

    def between_steps(self) -> None:
        """Pass on what the last step ended, and do what messages ask."""
        for example in self._recorder.ended():
            if self.status.running:
                self._outbox.add(example)
                self.status = replace(self.status, examples=self.status.examples + 1, dropped=self._outbox.dropped)
        running = self._engine.stats.running
        if running != self._running:
            self._outbox.load(running)
            self._running = running
        while not self._inbox.empty():
            self._inbox.get()()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing within the block. Only while the engine is idle."""
        self._recording.close()
        try:
            yield
        finally:
            self._record()

    def close(self) -> None:
        """End the trainer and the threads."""
        self._recording.close()
        self._outbox.close()
        self._trainer.close()
        for thread in self._threads:
            thread.join()
        self._trainer.stream.close()

    def _record(self) -> None:
        if self.status.running:
            self._recording.enter_context(recording(self._engine, self._recorder))

    # ---- in the engine's thread, asked for by a message ---------------------------------------------------------

    def _take_over(self, head: Head, number: str, taus: Mapping[str, float]) -> None:
        try:
            self._engine.update_head(head)
        except (ValueError, RuntimeError) as error:  # it does not fit, or its copy not into memory
            self._refuse(error)
            return
        before, after = taus["tau_before"], taus["tau_after"]
        status = self.status.judged(time.time(), before)  # what it was after, the trainer's next status says
        self.status = replace(status, taken_over=status.taken_over + 1, **taus)
        log.info("the head has learnt (%s): τ %.3f to %.3f on requests held back", number, before, after)

    def _refuse(self, error: Exception) -> None:
        self.status = replace(self.status, refused=self.status.refused + 1)
        log.error("what the head has learnt is refused, and it stays as it is: %s", error)

    def _judged(self, tau: float, numbers: Mapping[str, float]) -> None:
        self.status = replace(self.status.judged(time.time(), tau), **numbers)

    def _ended(self, why: str) -> None:
        self._recording.close()
        self._outbox.close()
        self.status = replace(self.status, running=False)
        log.error("the head learns no more, and stays as it is; the process that trained it has ended: %s", why)

    # ---- in threads of their own --------------------------------------------------------------------------------

    def _send(self) -> None:
        with suppress(OSError):  # the other thread says that the trainer has ended
            while (message := self._outbox.next()) is not None:
                send(self._trainer.stream, message)

    def _read(self) -> None:
        broken = ""
        try:
            while (message := receive(self._trainer.stream)) is not None:
                self._inbox.put(self._work_of(message))
        except Exception as error:  # whatever it was, the engine's thread must know
            broken = f"it sent what cannot be read ({error!r}); "
        self._inbox.put(partial(self._ended, broken + self._trainer.why_ended()))

    def _work_of(self, message: Message) -> Callable[[], None]:
        """Return what the engine's thread is to do. Raises ValueError or KeyError for a message of no trainer."""
        facts = message.facts
        if message.kind == "status":
            numbers = {"buffered": int(facts["buffered"]), "updates": int(facts["updates"])}
            return partial(self._judged, float(facts["tau"]), {**numbers, "seconds": float(facts["seconds"])})
        if message.kind != "candidate":
            raise ValueError(f"{message.kind}: not a message of a trainer")
        try:
            head = read_candidate(self._engine, message.tensors)
        except ValueError as error:
            return partial(self._refuse, error)
        taus = {name: float(facts.get(name, "nan")) for name in TAUS}
        return partial(self._take_over, head, facts["number"], taus)
