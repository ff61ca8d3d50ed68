"""For scripts that run train/run.py: their words are its own, and some keys that the script handles itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from infer.options.paths import REPO_ROOT


def read_words(doc: str | None, options: dict[str, str]) -> list[str]:
    """Set the keys of `options` from the `key=value` words of the command line; return the other words.

    -h prints `doc` and exits.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(doc)
        raise SystemExit(0)
    others = []
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key in options:
            options[key] = value
        else:
            others.append(word)
    return others


def whole_number(key: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{key}={text}: must be a whole number above 0")
    return int(text)


def run_training(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run train/run.py in a process of its own; the result holds its standard output."""
    command = [sys.executable, str(REPO_ROOT / "train" / "run.py"), *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
