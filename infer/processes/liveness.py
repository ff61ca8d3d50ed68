"""Notices at once that another process of a group has ended, whatever this process is doing.

Rank 0 and every other rank share a connection on which nothing is sent before the end. The kernel closes it however a
process ends (SIGKILL, out of memory), so no heartbeat is late and no timeout is guessed. A thread waits for that. It
matters where the main thread would never learn of it: while it loads weights, and in a collective of NCCL, whose wait
blocks a stream of the GPU only and raises nothing.

A process that ends in order says so first. One that fails says that it has failed. Rank 0 tells the others which rank
was lost. Messages are JSON: [rank, what], `what` being empty for an end in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import cast

from infer.processes import messages

ENDED, FAILED = "has ended", "has failed"
MOST_BYTES = 4096  # of a message
REASON_S = 2.0  # how long the reason of a failed collective is waited for
GRACE_S = 10.0  # how long a process may take to end by an exception of its own once another one is lost


class Liveness:
    """Watches the processes at the other ends of `connections`, by rank: on rank 0 all others, on the others rank 0.

    `on_lost(rank, what)` is called once, in a thread, when the first of them is lost; `what` is ENDED or FAILED.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection], on_lost: Callable[[int, str], None]) -> None:
        self._rank, self._connections, self._on_lost = rank, dict(connections), on_lost
        self._lost, self._closed, self._sending = threading.Event(), threading.Event(), threading.Lock()
        self._loss = ""
        self._woken, self._wake = Pipe(duplex=False)  # the second end's closing ends the thread
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def loss(self, patience_s: float = 0.0) -> str:
        """Return which process was lost and how; empty if none is within `patience_s` seconds."""
        self._lost.wait(patience_s)
        return self._loss

    def final_loss(self) -> str:
        """Return `loss` once every other process has ended, as they are known to do now."""
        self._thread.join(GRACE_S)
        return self._loss

    def closed(self, patience_s: float) -> bool:
        """Return whether `close` is called within `patience_s` seconds: this process is ending by itself."""
        return self._closed.wait(patience_s)

    def close(self, what: str = "") -> None:
        """Stop watching, and tell the others that this process ends in order, or `what` happened to it."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._tell(self._rank, what)
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for connection in (*self._connections.values(), self._woken):
            connection.close()

    def _watch(self) -> None:
        ranks = {connection: rank for rank, connection in self._connections.items()}
        waiting: list[Connection] = [*ranks, self._woken]
        while len(waiting) > 1:
            for ready in cast(list[Connection], wait(waiting)):
                if ready is self._woken:
                    return
                waiting.remove(ready)
                try:
                    rank, what = messages.receive(ready, MOST_BYTES)
                except (EOFError, OSError):
                    rank, what = ranks[ready], ENDED
                if what and not self._lost.is_set():
                    if self._rank == 0:
                        self._tell(rank, what)
                    self._loss = f"rank {rank} {what}"
                    self._lost.set()
                    self._on_lost(rank, what)

    def _tell(self, rank: int, what: str) -> None:
        with self._sending:
            for connection in self._connections.values():
                try:
                    messages.send(connection, [rank, what])
                except OSError:  # it has ended itself
                    continue
