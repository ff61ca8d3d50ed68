"""Ends a process of a training run when another one has ended, whatever it is doing (infer/processes/liveness.py).

The processes are connected by TCP, since they may run on several machines. A machine that is cut off closes no
connection: keep-alive probes find that out.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from accelerate import Accelerator

from infer.options.cli import USER_ERROR
from infer.options.paths import resolve_path
from infer.processes import messages
from infer.processes.liveness import ENDED, FAILED, GRACE_S, MOST_BYTES, REASON_S, Liveness
from infer.processes.process_end import end_at_once
from train.checkpoint import find_checkpoint
from train.config import TrainConfig
from train.distributed.collectives import broadcast
from train.signals import StopRequest

CONNECT_S = 300.0  # how long a process waits for the others, which come here at about the same time
HELLO_S = 10.0  # how long whoever connects may take to say who it is
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # seconds, seconds and probes


class OtherProcesses:
    """Ends this process with an error when another one of the run has ended, whatever this one is doing.

    gloo's collectives then raise, and `StopRequest.check` does. Neither may ever happen: the target is being loaded, or
    a collective of NCCL blocks the GPU, for hours. So this process has `GRACE_S` seconds to end by itself.
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, stop: StopRequest, resume: str) -> None:
        self._config, self._stop, self._resume = config, stop, resume
        self._liveness = connect_processes(accelerator, self._on_lost)
        self._liveness.start()

    def leave(self, *, failed: bool) -> None:
        """Tell the others that this process ends, and stop watching them."""
        self._liveness.close(FAILED if failed else "")

    def message(self, error: RuntimeError | None = None) -> str:
        """Return the error message; `error` is that of a collective, which does not know which process was lost."""
        lost = self._liveness.loss(REASON_S if error is not None else 0.0)
        if not lost:
            lost = f"another process has ended or does not respond ({str(error).splitlines()[0]})"
        folder = resolve_path(self._config.output_dir) / str(self._config.run) / "checkpoints"
        return (
            f"parallel={self._config.parallel.name}: {lost}, so this process ends too; the other's output says why. "
            f"Last good checkpoint: {find_checkpoint(folder) or 'none yet'}; resume with: {self._resume}"
        )

    def _on_lost(self, rank: int, what: str) -> None:
        """In the liveness thread. A process that has failed need not be the first to: this one may say why itself."""
        if what == ENDED:
            self._stop.lost = self._liveness.loss()
            print(f"{self._stop.lost}: this process stops", file=sys.stderr, flush=True)  # NCCL may abort it first
        if not self._liveness.closed(GRACE_S):
            end_at_once(f"error: {self.message()}", USER_ERROR)


def connect_processes(accelerator: Accelerator, on_lost: Callable[[int, str], None]) -> Liveness:
    """Connect the process of rank 0 with all others; call this on every process, and `start` the result.

    Raises ValueError if a process does not connect, and OSError if rank 0 cannot be reached.
    """
    count, rank = accelerator.num_processes, accelerator.process_index
    if count == 1:
        return Liveness(0, {}, on_lost)
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(count)
    if rank:
        port, token = broadcast(accelerator, (0, ""))
        host = "127.0.0.1" if one_machine else os.environ["MASTER_ADDR"]
        connection = kept_alive(socket.create_connection((host, port), timeout=CONNECT_S))
        messages.send(connection, [rank, token])
        return Liveness(rank, {0: connection}, on_lost)
    with listen("127.0.0.1" if one_machine else "") as listener:
        token = secrets.token_hex(16)
        broadcast(accelerator, (listener.getsockname()[1], token))
        return Liveness(0, accept_all(listener, token, count), on_lost)


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port; host "": on all interfaces."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, 0))


def accept_all(listener: socket.socket, token: str, count: int) -> dict[int, Connection]:
    """Return a connection to every rank from 1 to `count` - 1. Whoever does not know the token is dropped."""
    connections: dict[int, Connection] = {}
    listener.settimeout(CONNECT_S)
    while len(connections) < count - 1:
        try:
            connection = kept_alive(listener.accept()[0])
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(1, count) if rank not in connections)
            raise ValueError(f"processes {missing} of {count} did not connect to rank 0") from None
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
            if connection.poll(HELLO_S):
                rank, word = messages.receive(connection, MOST_BYTES)
                if hmac.compare_digest(word, token):
                    connections[rank] = connection
                    continue
        connection.close()
    return connections


def kept_alive(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(connected.detach())
