"""Tensor parallel ranks and their communication: commands from rank 0, collectives over parts of tensors among all.

Commands go through pipes, where the other ranks wait as long as rank 0 is idle; a closed pipe ends them. Tensors go
through torch.distributed, without its global state: gloo on loopback or, on GPUs, NCCL, where a rank that does not
respond in time counts as lost. They travel as bytes, so no bit changes. Knows neither targets nor what commands mean.

A rank that has ended is noticed by its connection (liveness.py). gloo's collectives then raise, and RankLost says which
rank it was. NCCL's do not: rank 0 waits for results that never come, until the watchdog of NCCL aborts the process. So
the liveness thread reports the lost rank at once and, if the main thread stays in the collective, ends the process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

from infer.processes import messages
from infer.processes.children import Children
from infer.processes.liveness import FAILED, GRACE_S, REASON_S, Liveness
from infer.processes.process_end import end_at_once
from models.sharding import Part

PATIENCE = timedelta(seconds=60)  # timeout of one collective


class RankLost(ConnectionError):
    """A rank ended or does not respond. Nothing can be computed any more."""


class Channel(NamedTuple):
    """What connects two ranks beside the collectives."""

    commands: Connection
    liveness: Connection  # nothing is sent on it before the end


class Ranks:
    """One of `count` processes on this machine. Call `connect` before any communication.

    `channels`: of rank 0 to all others, of any other rank to rank 0. `children`: the processes that rank 0 started.
    `leave(why)`: ends this process when another rank is lost, whatever the main thread does; for ranks other than 0,
    which have no other work.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        store: Store,
        channels: Mapping[int, Channel],
        device: torch.device,
        children: Children | None = None,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        self.rank, self.count, self.device = rank, count, device
        self._store, self._children, self._leave = store, children, leave
        self._connections = [channel.commands for channel in channels.values()]
        self._closed = False
        self._data: Any = None
        self._raises = device.type != "cuda"  # whether a collective with a lost rank raises
        self._communicating = False
        self._work: Any = None  # the last collective
        self._liveness = Liveness(rank, {peer: ends.liveness for peer, ends in channels.items()}, self._on_lost)
        self._liveness.start()

    @property
    def part(self) -> Part:
        return Part(self.rank, self.count, self.gather)

    # ---- connect and close --------------------------------------------------------------------------------------

    def connect(self, error: str = "") -> None:
        """Connect this rank once it has loaded its part. `error`: why it could not; rank 0 then raises ValueError."""
        if self.rank == 0:
            self._await_loaded()
        else:
            with self._others():
                messages.send(self._connections[0], error)
                if error:
                    return
                messages.receive(self._connections[0])
        with self._others():
            self._data = _process_group(self._store, self.rank, self.count, self.device)
        self.gather(torch.zeros(1, device=self.device), [1] * self.count)  # NCCL connects at the first collective

    def _await_loaded(self) -> None:
        """Wait until all other ranks have loaded, then tell them so: they connect at the same time."""
        waiting = list(self._connections)
        while waiting:
            for ready in cast(list[Connection], wait(waiting)):
                with self._others():
                    error = messages.receive(ready)
                if error:
                    raise ValueError(error)
                waiting.remove(ready)
        self._send(None)

    def close(self, what: str = "") -> None:
        """On rank 0: end the other ranks, which wait for a command or are in a collective. May be called twice.

        `what`: FAILED if they are to end with an error, wherever they are.
        """
        self.disconnect(what)
        if self._children is not None:
            self._children.close()

    def disconnect(self, what: str = "") -> None:
        """Release this rank's process group, which joins its threads: one that still releases the tensors of a
        collective while the interpreter exits would abort the process.
        """
        self._closed, self._data, self._work = True, None, None  # a collective keeps its group alive
        self._liveness.close(what)  # last of what may block: until then a lost rank still ends this process
        for connection in self._connections:
            connection.close()

    def check(self) -> None:
        """Raises RankLost if another rank has ended, which would otherwise show at the next command only."""
        with self._others():
            pass

    # ---- commands -----------------------------------------------------------------------------------------------

    @contextmanager
    def leading(
        self, operation: str, values: Sequence[Any] = (), tensors: Sequence[Tensor | None] = ()
    ) -> Iterator[None]:
        """On rank 0: the others run `operation` while it runs the block. If that fails, it ends them (out of step)."""
        try:
            self.send(operation, values, tensors)
            yield
        except BaseException:
            self.close(FAILED)
            raise

    def send(self, operation: str, values: Sequence[Any] = (), tensors: Sequence[Tensor | None] = ()) -> None:
        """Send a command to all other ranks, which `receive` it.

        `values` are of JSON's types; `tensors` have one dtype.
        """
        parts = [tensor.flatten() for tensor in tensors if tensor is not None]
        payload = torch.cat(parts) if parts else torch.empty(0)
        shapes = [None if tensor is None else list(tensor.shape) for tensor in tensors]
        self._send([operation, values, str(payload.dtype).removeprefix("torch."), shapes])
        if parts:
            with self._others():
                self._wait(self._data.broadcast([payload.view(torch.uint8)]))

    def _send(self, message: object) -> None:
        with self._others():
            for connection in self._connections:
                messages.send(connection, message)

    def receive(self) -> tuple[str, Sequence[Any], list[Any]] | None:
        """Wait for rank 0's next command; return its operation, values and tensors, or None if there will be none.

        Raises RankLost if there will be none because a rank was lost.
        """
        try:
            operation, values, dtype, shapes = messages.receive(self._connections[0])
        except (EOFError, OSError):
            if loss := self._liveness.final_loss():
                raise RankLost(self._message(loss)) from None
            return None
        sizes = [0 if shape is None else math.prod(shape) for shape in shapes]
        payload = torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=self.device)
        if any(shape is not None for shape in shapes):
            with self._others():
                self._wait(self._data.broadcast([payload.view(torch.uint8)]))
        parts = zip(payload.split(sizes), shapes, strict=True)
        return operation, values, [None if shape is None else part.view(shape) for part, shape in parts]

    # ---- parts of tensors ---------------------------------------------------------------------------------------

    def gather(self, x: Tensor, sizes: Sequence[int], *, everywhere: bool = True) -> Tensor:
        """Implement models.sharding.Gather. Unless `everywhere`, ranks other than 0 get a tensor without columns."""
        widest, lead = max(sizes), x.shape[:-1]
        padded = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1]))).contiguous().flatten()
        gathered = padded.new_empty(self.count if everywhere or self.rank == 0 else 0, *lead, widest)
        sent, received = padded.view(torch.uint8), gathered.flatten().view(torch.uint8)
        with self._others():
            if everywhere:
                self._wait(self._data._allgather_base(received, sent))
            else:
                outputs = [list(received.chunk(self.count))] if self.rank == 0 else []
                self._wait(self._data.gather(outputs, [sent]))  # to rank 0
        if not len(gathered):
            return x[..., :0]
        if min(sizes) == widest:
            return gathered.movedim(0, -2).reshape(*lead, self.count * widest)
        return torch.cat([part[..., :size] for part, size in zip(gathered, sizes, strict=True)], dim=-1)

    def least(self, free: int | None) -> int | None:
        """Return the free bytes that every rank can use; on a CPU all see the same and share it. None: unknown."""
        sharing = self.count if self.device.type == "cpu" else 1
        local = torch.tensor([-1 if free is None else free // sharing], device=self.device)
        smallest = int(self.gather(local, [1] * self.count).min())
        return None if smallest < 0 else smallest

    # ---- lost ranks ---------------------------------------------------------------------------------------------

    def _wait(self, work: Any) -> None:
        self._work = work
        work.wait()

    @contextmanager
    def _others(self) -> Iterator[None]:
        """Turn a communication error into RankLost, which says which rank has ended."""
        if self._closed:
            raise RankLost(f"engine.tensor_parallel={self.count}: the other ranks were ended; make a new engine")
        self._communicating = True
        try:
            if loss := self._liveness.loss():
                raise ConnectionError(loss)
            yield
        except (RuntimeError, EOFError, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            loss = self._liveness.loss(REASON_S) or f"a rank has ended or does not respond ({reason})"
            message = self._message(loss)
            self.close(FAILED)
            raise RankLost(message) from error
        finally:
            self._communicating = False

    def _message(self, loss: str) -> str:
        how = self._children.ended(REASON_S) if self._children is not None else ""
        return f"engine.tensor_parallel={self.count}: {how or loss}; its own output says why"

    def _on_lost(self, rank: int, what: str) -> None:
        """In the liveness thread, once another rank is lost. Rank 0 itself says why it has failed."""
        message = self._message(f"rank {rank} {what}")
        if self._leave is not None:
            self._leave("" if what == FAILED else f"error: {message}. Rank {self.rank} ends too")
        elif not self._raises:
            print(f"error: {message}", file=sys.stderr, flush=True)  # NCCL's watchdog may abort this process first
            if self._liveness.closed(GRACE_S):
                return
            # a collective may be unfinished on the GPU, where the host has moved on
            if self._communicating or (self._work is not None and not self._work.is_completed()):
                end_at_once(f"error: {message}. Rank {self.rank} waits for its results and ends too")


def _process_group(store: Store, rank: int, count: int, device: torch.device) -> Any:
    """Return a process group of gloo on loopback or, on GPUs, of NCCL."""
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        kind: Any = ProcessGroupNCCL
        options = kind.Options()
    else:
        kind = ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout = PATIENCE
    return kind(store, rank, count, options)
