"""The base of a config's relative paths."""

from __future__ import annotations

from pathlib import Path

from models.checks import home_path

REPO_ROOT = Path(__file__).resolve().parents[2]


def resolve_path(path: str) -> Path:
    """Resolve a config's path relative to the repository, so that a command means the same from any folder."""
    return REPO_ROOT / home_path(path)
