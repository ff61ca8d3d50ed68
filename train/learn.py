"""Trains a head on what a server serves with it; `python infer/serve.py learn=true` starts this process.

The keys are in conf/learn.yaml. HEADWAY_LEARN_FD is the number of the inherited socket.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import socket
from contextlib import suppress
from pathlib import Path

from infer.learning.trainer import DESCRIPTOR
from infer.options.cli import entry_point
from infer.options.exported_heads import with_head
from train.config import LearnConfig


@entry_point("learn", LearnConfig)
def main(config: LearnConfig) -> None:
    number = os.environ.get(DESCRIPTOR, "")
    if not number.isdecimal():
        raise ValueError(f"{DESCRIPTOR}={number}: a server starts this command; say python infer/serve.py learn=true")
    os.nice(config.learning.nice)
    if os.getsid(0) == os.getpid():  # a server gives it a session of its own, and Linux divides time among these first
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(config.learning.nice))
    with socket.socket(fileno=int(number)) as stream:
        from train.learning.process import learn  # command-line errors are reported before torch is imported

        learn(with_head(config), stream)


if __name__ == "__main__":
    main()
