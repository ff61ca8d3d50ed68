"""Shared by the client programs in this folder: the server's address, prompts, expected responses, and result format.

Runs in the clients' environment, in which Headway is not installed.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any

URL = os.environ["HEADWAY_URL"]
MODEL = os.environ["HEADWAY_MODEL"]
ASKED, SAID = "What is 1+2?", "It is 3."  # as trained by target.py
ASKED_JSON = "Add 1 and 2, as JSON."
ARGUMENTS = {"a": 1, "b": 2}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def run(package: str, **checks: Callable[[], object]) -> None:
    """Run the checks; print the package's version and the result of each check, as one line of JSON each."""
    print(json.dumps({"version": metadata.version(package)}), flush=True)
    for name, check in checks.items():
        error = None
        try:
            check()
        except Exception as problem:
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"
        print(json.dumps({"check": name, "error": error}), flush=True)


def expect(value: object, wanted: object) -> None:
    if value != wanted:
        raise AssertionError(f"{value!r}, not {wanted!r}")
