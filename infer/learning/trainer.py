"""The process that trains a server's head, train/learn.py: how it is started, and how it ends.

It is connected by a socket and ends with it: by `close`, or by any end of the server. It has a session of its own, so
that Ctrl-C in a terminal reaches the server only.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import fields

from infer.config import LearningConfig, ModelConfig, ServeConfig
from infer.learning.messages import receive
from infer.options.literal_text import NULL
from infer.processes.children import END_S, how
from infer.settings.draft_tree import Beam
from infer.settings.paths import REPO_ROOT
from models.heads.config import HeadConfig

DESCRIPTOR = "HEADWAY_LEARN_FD"  # environment variable: the number of the inherited socket
GROUPS = {"model": ModelConfig, "head": HeadConfig, "learning": LearningConfig}


def words_of(config: ServeConfig) -> list[str]:
    """Return the trainer's command line: for the target and the head of this server."""
    keys = {
        f"{group}.{field.name}": getattr(getattr(config, group), field.name)
        for group, schema in GROUPS.items()
        for field in fields(schema)
    }
    keys |= {"head": config.head.name, "output_dir": config.output_dir, "draft_tokens": depth_of(config)}
    return [f"{key}={NULL if value is None else value}" for key, value in keys.items()]


def depth_of(config: ServeConfig) -> int:
    """Return the most tokens in a row that the head drafts."""
    shape = config.proposer.shape
    if isinstance(shape, Beam):
        return shape.depth
    return max(map(len, shape)) if isinstance(shape, list) else config.proposer.draft_tokens


class Trainer:
    """`stream` is the server's end of the socket."""

    def __init__(self, config: ServeConfig) -> None:
        self.stream, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the process
        command = [sys.executable, str(REPO_ROOT / "train" / "learn.py"), *words_of(config)]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, DESCRIPTOR: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid

    def new_head(self) -> str:
        """Wait for the untrained head that it writes where there is none yet, and return its folder.

        Raises ValueError with what it refuses.
        """
        message = receive(self.stream)
        if message is None:
            raise ValueError(f"learn=true: {self.why_ended()}")
        return message.facts["folder"]

    def why_ended(self) -> str:
        """Return how the process ended, and what it said; one that has not is given END_S seconds."""
        code = self._end()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        return said.removeprefix("error: ") if said else how(code)

    def close(self) -> None:
        """End the process, whatever it computes. Threads that use the stream come back."""
        with suppress(OSError):  # it has ended before
            self.stream.shutdown(socket.SHUT_RDWR)
        self._process.terminate()
        self._end()

    def _end(self) -> int:
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
