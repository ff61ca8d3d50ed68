"""Provenance of a head: commit, versions, configuration, data and target, as one JSON-ready record."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from infer.config import ModelConfig
from infer.console.command_words import portable_path
from infer.options.paths import REPO_ROOT
from train.publishing.trackers import redact

PACKAGES = ("headway", "torch", "accelerate", "transformers", "tokenizers", "safetensors", "hydra-core", "numpy")


def provenance(config: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "git": git_state(),
        "versions": versions(),
        "config": redact(config),
    }


def portable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that can be published: no text in it contains a path of this machine.

    Paths inside the repository become relative to it; of others only the last part is kept.
    """
    stated = [record.get("config", {}), record.get("target", "")]  # paths in other texts are quoted from these
    places = sorted({text for text in _texts(stated) if Path(text).is_absolute()}, key=len, reverse=True)
    names = {place: portable_path(place) or f".../{Path(place).name}" for place in places}
    return _renamed(record, names | {f"{REPO_ROOT}/": "", str(REPO_ROOT): ".", f"{os.path.expanduser('~')}/": "~/"})


def target_name(model: ModelConfig) -> str:
    """Return a target's hub id or its folder in the repository; for other folders, its name on the command line."""
    return portable_path(model.path) or model.name


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for place, name in names.items():
            value = re.sub(
                rf"(?<![\w.]){re.escape(place)}", lambda _, name=name: name, value
            )  # not in the middle of a longer path or URL
        return value
    if isinstance(value, Mapping):
        return {key: _renamed(item, names) for key, item in value.items()}
    return [_renamed(item, names) for item in value] if isinstance(value, list | tuple) else value


def code_state() -> dict[str, Any]:
    """Return version, commit and whether tracked files differ from it; None where unknown."""
    return {"version": versions().get("headway"), **git_state()}


def git_state() -> dict[str, Any]:
    """Return commit and whether tracked files differ from it; None outside of a git checkout."""
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
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed
