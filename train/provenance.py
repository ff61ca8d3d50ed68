"""Where a head comes from: commit, versions, configuration, data and target, as one JSON-ready record."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from infer.config_checks import REPO_ROOT
from train.trackers import redact

PACKAGES = ("headway", "torch", "accelerate", "transformers", "tokenizers", "safetensors", "hydra-core", "numpy")


def provenance(config: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "git": git_state(),
        "versions": versions(),
        "config": redact(config),
    }


def code_state() -> dict[str, Any]:
    """Version, commit and whether tracked files differ from it; null for what is not known here."""
    return {"version": versions().get("headway"), **git_state()}


def git_state() -> dict[str, Any]:
    """Commit and whether tracked files differ from it; nulls where this is no git checkout."""
    commit = run_git("rev-parse", "HEAD")
    changes = run_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit or None, "dirty": None if changes is None else bool(changes)}


def run_git(*arguments: str) -> str | None:
    command = ["git", "-C", str(REPO_ROOT), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
