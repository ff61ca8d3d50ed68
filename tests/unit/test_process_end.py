"""One of several processes ends with its exit code after threads and atexit functions, without teardown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import atexit, sys, threading
from infer.processes.process_end import run_process


class Torn:
    def __del__(self):
        sys.stderr.write("torn down\\n")


def say(text):
    sys.stdout.write(text + "\\n")  # in one piece: two threads write at the same time


def main():
    global kept
    kept = Torn()
    atexit.register(say, "at exit")
    threading.Thread(target=say, args=("in a thread",)).start()
    say("done")
    {end}


run_process(main)
"""


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no target')", 1, "no target\n"),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken\n"),
    ],
)
@pytest.mark.parametrize("count", ["1", "2"])
def test_a_process_ends_as_the_interpreter_would_end_it(count, end, code, message):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)],
        cwd=ROOT,
        env={**os.environ, "WORLD_SIZE": count},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == code, process.stderr
    assert sorted(process.stdout.splitlines()) == ["at exit", "done", "in a thread"]
    assert process.stderr.replace("torn down\n", "").endswith(message)
    assert ("torn down" in process.stderr) == (count == "1")
