"""The processes that rank 0 starts for the other tensor parallel ranks, and how they end with it.

A child is connected with rank 0 by two sockets, for commands and for liveness, and exits when they are closed: by
`close`, or by any end of rank 0. It has a session of its own, so that Ctrl-C in a terminal reaches rank 0 only.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from infer.processes import messages
from infer.settings.paths import REPO_ROOT

END_S = 5.0  # how long a child may take to exit by itself before it is killed


class Children:
    """One process of infer/follower.py per entry of `settings`, each of which is sent to its process."""

    def __init__(self, settings: Sequence[object], folder: tempfile.TemporaryDirectory[str]) -> None:
        self._folder = folder  # holds the ranks' store; removed in `close`
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[tuple[Connection, Connection]] = []  # of each: commands, liveness
        try:
            for child_settings in settings:
                (commands, remote), (liveness, remote_liveness) = Pipe(), Pipe()
                self.connections.append((commands, liveness))
                remotes = [remote.fileno(), remote_liveness.fileno()]
                command = [sys.executable, str(REPO_ROOT / "infer" / "follower.py"), *map(str, remotes)]
                # It prints to standard error: a program may read standard output.
                self._processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=remotes, start_new_session=True
                    )
                )
                remote.close()
                remote_liveness.close()
                messages.send(commands, child_settings)
        except BaseException:
            self.close()
            raise

    def ended(self, patience_s: float) -> str:
        """Return which children have exited and how; empty if none does within `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while True:
            codes = {rank: child.poll() for rank, child in enumerate(self._processes, start=1)}
            gone = [f"rank {rank} has ended ({how(code)})" for rank, code in codes.items() if code is not None]
            if gone or time.monotonic() >= deadline:
                return ", ".join(gone)
            time.sleep(0.02)

    def close(self) -> None:
        for connection in itertools.chain.from_iterable(self.connections):
            connection.close()
        deadline = time.monotonic() + END_S
        for child in self._processes:
            child.terminate()  # ends one that is loading; others ignore it and exit because of the closed sockets
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._folder.cleanup()


def how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
