"""Tensor parallel ranks and their communication: commands from rank 0, collectives over parts of tensors among all.

Uses torch.distributed without its global state. Commands go through gloo on loopback, where the other ranks wait as
long as rank 0 is idle; tensors through gloo or, on GPUs, NCCL, where a rank that does not respond in time counts as
lost. Tensors travel as bytes, so no bit changes. Knows neither targets nor what the commands mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import GatherOptions, PrefixStore, ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

from infer.parallel.children import Children
from models.parallel import Part

IDLE = timedelta(days=3650)  # timeout between two commands
ANSWER = timedelta(seconds=60)  # timeout of one collective
POLL_S = 0.02
HEADER = 1024  # numbers that describe a command
STOP = -1
DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.float16)


class RankLost(ConnectionError):
    """A rank ended or does not respond. Nothing can be computed any more."""


class Ranks:
    """One of `count` processes on this machine. Call `connect` before any communication."""

    def __init__(
        self, rank: int, count: int, store: Store, device: torch.device, children: Children | None = None
    ) -> None:
        self.rank, self.count, self.device = rank, count, device
        self._store, self._children = store, children
        self._connected = self._closed = False
        self._control: Any = None
        self._data: Any = None
        store.set_timeout(IDLE)

    @property
    def part(self) -> Part:
        return Part(self.rank, self.count, self.gather)

    # ---- connect and close --------------------------------------------------------------------------------------

    def connect(self, error: str = "") -> None:
        """Connect this rank once it has loaded its part. `error`: why it could not; rank 0 then raises ValueError."""
        if self.rank:
            self._store.set(f"loaded/{self.rank}", error)
        else:
            self._await_loaded()
        if error:
            return
        # Other ranks may wait for a command indefinitely; rank 0 must not wait long for them to receive it.
        patience = IDLE if self.rank else ANSWER
        self._control = _gloo(PrefixStore("control", self._store), self.rank, self.count, patience)
        self._data = (_nccl if self.device.type == "cuda" else _gloo)(
            PrefixStore("data", self._store), self.rank, self.count, ANSWER
        )
        self._connected = True
        self.gather(torch.zeros(1, device=self.device), [1] * self.count)  # NCCL connects at the first collective

    def close(self) -> None:
        """On rank 0: end the other ranks. May be called twice, and after a rank was lost."""
        with suppress(RankLost):
            if self._connected and not self._closed:
                self.send(STOP)
        self._end()

    def disconnect(self) -> None:
        """Release this rank's process groups, which joins their threads: one that still releases the tensors of a
        collective while the interpreter exits would abort the process.
        """
        self._closed = True
        self._control = self._data = None

    def _end(self) -> None:
        """Disconnect without sending STOP: the other ranks may be waiting in a collective."""
        self.disconnect()
        if self._children is not None:
            self._children.close()

    def _await_loaded(self) -> None:
        waiting = set(range(1, self.count))
        while waiting:
            ended = self._children.ended() if self._children is not None else ""  # before reading what they reported
            for rank in [rank for rank in waiting if self._store.check([f"loaded/{rank}"])]:
                if error := self._store.get(f"loaded/{rank}").decode():
                    raise ValueError(error)
                waiting.remove(rank)
            if waiting and ended:
                raise RankLost(f"engine.tensor_parallel={self.count}: {ended} while loading; its own output says why")
            time.sleep(POLL_S)

    # ---- commands -----------------------------------------------------------------------------------------------

    @contextmanager
    def leading(self, operation: int, numbers: Sequence[int] = (), tensors: Sequence[Tensor] = ()) -> Iterator[None]:
        """On rank 0: the others run `operation` while it runs the block. If that fails, it ends them (out of step)."""
        try:
            self.send(operation, numbers, tensors)
            yield
        except BaseException:
            self._end()
            raise

    def send(self, operation: int, numbers: Sequence[int] = (), tensors: Sequence[Tensor] = ()) -> None:
        """Broadcast a command to all other ranks, which `receive` it; all `tensors` have one dtype."""
        payload = torch.cat([tensor.flatten() for tensor in tensors]) if tensors else torch.empty(0)
        shapes = [number for tensor in tensors for number in (tensor.ndim, *tensor.shape)]
        head = [operation, len(numbers), *numbers, DTYPES.index(payload.dtype), len(tensors), *shapes]
        assert len(head) <= HEADER
        header = torch.tensor(head + [0] * (HEADER - len(head)))
        with self._others():
            self._control.broadcast([header]).wait()
            if tensors:
                self._data.broadcast([payload.view(torch.uint8)]).wait()

    def receive(self) -> tuple[int, list[int], list[Tensor]]:
        """Wait for rank 0's next command; return its operation, numbers and tensors."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        with self._others():
            self._control.broadcast([header]).wait()
        values = iter(header.tolist())
        operation = next(values)
        numbers = [next(values) for _ in range(next(values))]
        dtype = DTYPES[next(values)]
        shapes = [[next(values) for _ in range(next(values))] for _ in range(next(values))]
        if not shapes:
            return operation, numbers, []
        sizes = [math.prod(shape) for shape in shapes]
        payload = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        with self._others():
            self._data.broadcast([payload.view(torch.uint8)]).wait()
        pieces = zip(payload.split(sizes), shapes, strict=True)
        return operation, numbers, [piece.view(shape) for piece, shape in pieces]

    # ---- parts of tensors ---------------------------------------------------------------------------------------

    def gather(self, x: Tensor, sizes: Sequence[int], *, everywhere: bool = True) -> Tensor:
        """Implement models.parallel.Gather. Unless `everywhere`, ranks other than 0 get a tensor without columns."""
        widest, lead = max(sizes), x.shape[:-1]
        padded = F.pad(x, (0, widest - x.shape[-1])).flatten()
        gathered = padded.new_empty(self.count if everywhere or self.rank == 0 else 0, *lead, widest)
        sent, received = padded.view(torch.uint8), gathered.flatten().view(torch.uint8)
        with self._others():
            if everywhere:
                self._data._allgather_base(received, sent).wait()
            else:
                outputs = [list(received.chunk(self.count))] if self.rank == 0 else []
                self._data.gather(outputs, [sent], _to_rank_0()).wait()
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

    @contextmanager
    def _others(self) -> Iterator[None]:
        """Turn a communication error into RankLost, which says which rank has ended."""
        if self._closed:
            raise RankLost(f"engine.tensor_parallel={self.count}: the other ranks were ended; make a new engine")
        try:
            yield
        except RuntimeError as error:
            ended = self._children.ended(patience_s=2) if self._children is not None else ""
            self._end()
            detail = ended or f"a rank has ended or does not answer ({str(error).splitlines()[0]})"
            raise RankLost(f"engine.tensor_parallel={self.count}: {detail}; its own output says why") from error


def _gloo(store: Store, rank: int, count: int, timeout: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return gloo(store, rank, count, options)


def _nccl(store: Store, rank: int, count: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, count, options)


def _to_rank_0() -> GatherOptions:
    options = GatherOptions()
    options.rootRank = 0
    return options
