"""The base of a config's relative paths."""

from __future__ import annotations

import os
from pathlib import Path

from models.checks import home_path

REPO_ROOT = Path(__file__).resolve().parents[2]


def resolve_path(path: str) -> Path:
    """Resolve a config's path relative to the repository, so that a command means the same from any folder."""
    return REPO_ROOT / home_path(path)


def private(path: str, flags: int) -> int:
    """Open a file that holds what users have written or read: for nobody else. An `opener` of `open`."""
    return os.open(path, flags, 0o600)


def short(path: Path) -> str:
    """Return a path as people write it: relative to the repository if inside it."""
    return str(path.relative_to(REPO_ROOT) if path.is_relative_to(REPO_ROOT) else path)
