"""The processes that rank 0 starts for the other tensor parallel ranks, and how they end with it.

A child holds the read end of a pipe and exits when the write end is closed: by `close`, or by any end of rank 0. It has
a session of its own, so that Ctrl-C in a terminal reaches rank 0 only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.config_checks import REPO_ROOT

END_S = 5.0  # how long a child may take to exit by itself before it is killed


class Children:
    """One process of infer/follower.py per entry of `settings`, which it receives as JSON."""

    def __init__(self, settings: Sequence[Mapping[str, Any]], folder: tempfile.TemporaryDirectory[str]) -> None:
        self._folder = folder  # holds the ranks' store; removed in `close`
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, str(REPO_ROOT / "infer" / "follower.py")]
        try:
            for child_settings in settings:
                # It prints to standard error: a program may read standard output.
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
                self._processes.append(child)
                assert child.stdin is not None
                child.stdin.write(json.dumps(child_settings).encode() + b"\n")
                child.stdin.flush()
        except BaseException:
            self.close()
            raise

    def ended(self, patience_s: float = 0.0) -> str:
        """Return which children have exited and how; empty if none does within `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while True:
            codes = {rank: child.poll() for rank, child in enumerate(self._processes, start=1)}
            gone = [f"rank {rank} has ended ({how(code)})" for rank, code in codes.items() if code is not None]
            if gone or time.monotonic() >= deadline:
                return ", ".join(gone)
            time.sleep(0.02)

    def close(self) -> None:
        for child in self._processes:
            if child.stdin is not None and not child.stdin.closed:
                child.stdin.close()
        deadline = time.monotonic() + END_S
        for child in self._processes:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._folder.cleanup()


def how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def read_settings() -> dict[str, Any]:
    """In a child: read its settings from the pipe. From then on it exits when rank 0 does."""
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_rank_0, args=(Path(settings["store"]).parent,), daemon=True).start()
    return settings


def _end_with_rank_0(folder: Path) -> None:
    os.read(0, 1)  # returns when the pipe's write end is closed
    shutil.rmtree(folder, ignore_errors=True)  # rank 0 may have ended without removing it
    os._exit(0)
