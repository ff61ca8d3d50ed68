"""Checks that only schemas of infer/ and train/ share, and the base of a config's relative paths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from models.checks import home_path

REPO_ROOT = Path(__file__).resolve().parent.parent
ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9A-Fa-f:]+\](:[0-9]{1,5})?")
FREE_TEXT = {"free_text": True}  # a field whose value on the command line is always taken literally


def check_origins(key: str, origins: Sequence[str]) -> None:
    """Check values of the `origin` header that a browser sends: scheme, host and port, without a path."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ValueError(f"{key}={origin}: must be *, or http(s)://host[:port], without a path")
    if "*" in origins and len(origins) > 1:
        raise ValueError(f"{key}={list(origins)}: * stands for every origin; leave out the others")


def resolve_path(path: str) -> Path:
    """Resolve a config's path relative to the repository, so that a command means the same from any folder."""
    return REPO_ROOT / home_path(path)
