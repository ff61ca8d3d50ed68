"""Runs commands as processes forked from one that has imported torch, which takes a new interpreter 5 CPU seconds.

Each is a process of its own, with its arguments, environment, folder and files, and runs its script as Python does.
What only a new interpreter shows needs `subprocess.run`: one test of each command, and variables that libraries read
when they are imported.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("numpy", "torch", "safetensors.torch", "hydra", "omegaconf")  # none reads what tests set for one command
TIMEOUT_S = 900
FILES = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY | os.O_CREAT), ("stderr", os.O_WRONLY | os.O_CREAT))


class Run(Protocol):
    def __call__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: str | Path = ROOT,
        env: Mapping[str, str] | None = None,
        input: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a script with its arguments, or "-c" and a program, to its end, which a signal brings after TIMEOUT_S."""


@contextmanager
def forks() -> Iterator[Run]:
    """Start the process that forks; yield what runs a command in it."""
    with subprocess.Popen(
        [sys.executable, __file__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run(
            arguments: Sequence[str | Path],
            *,
            cwd: str | Path = ROOT,
            env: Mapping[str, str] | None = None,
            input: str = "",
        ) -> subprocess.CompletedProcess[str]:
            with tempfile.TemporaryDirectory() as folder:
                places = {name: Path(folder) / name for name, _ in FILES}
                places["stdin"].write_text(input)
                order = {
                    "arguments": [str(word) for word in arguments],
                    "cwd": str(cwd),
                    "env": dict(os.environ if env is None else env),
                    "files": {name: str(place) for name, place in places.items()},
                }
                print(json.dumps(order), file=server.stdin, flush=True)
                code = int(server.stdout.readline())
                out, err = (places[name].read_text(errors="replace") for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess(order["arguments"], code, out, err)

        try:
            yield run
        finally:
            server.stdin.close()


def serve() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    while line := sys.stdin.readline():
        pid = os.fork()
        if not pid:
            become(json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def become(order: dict[str, Any]) -> None:
    """Turn this process into the one that was asked for, and run it."""
    for number, (name, flags) in enumerate(FILES):
        os.dup2(os.open(order["files"][name], flags), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # found from the environment when it is first asked for, which torch does
    os.chdir(order["cwd"])
    signal.alarm(TIMEOUT_S)
    script, *words = sys.argv = order["arguments"]
    if script == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), main.__dict__)  # noqa: S102 - a test's own program
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    serve()
