"""Provenance of a head: commit, versions, configuration, data and target, as one JSON-ready record."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from infer.config import ModelConfig
from infer.console.command_words import portable_path
from infer.options.model_names import PACKAGE
from infer.settings.paths import REPO_ROOT
from models.fetching import MODELS
from models.hub import is_hub_id

PACKAGES = ("headway", "torch", "accelerate", "transformers", "tokenizers", "safetensors", "hydra-core", "numpy")
SECRET_KEY = re.compile(r"(key|token|secret|password|passwd|credentials?|auth)$", re.IGNORECASE)
SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-)\w{8,}|//[^/\s:@]+:[^/\s@]+@")


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
    from torch.utils._pytree import tree_leaves, tree_map  # with torch, which not every caller needs

    # paths in other texts are quoted from these
    stated = tree_leaves([record.get("config", {}), record.get("target", "")])
    paths = {leaf for leaf in stated if isinstance(leaf, str) and Path(leaf).is_absolute()}
    places = sorted(paths, key=len, reverse=True)
    names = {place: portable_path(place) or f".../{Path(place).name}" for place in places}
    names |= {f"{REPO_ROOT}/": "", str(REPO_ROOT): ".", f"{os.path.expanduser('~')}/": "~/"}

    def renamed(value: Any) -> Any:
        for place, name in names.items() if isinstance(value, str) else ():
            # not in the middle of a longer path or URL
            value = re.sub(rf"(?<![\w.]){re.escape(place)}", lambda _, name=name: name, value)
        return value

    return tree_map(renamed, dict(record))


def target_name(model: ModelConfig) -> str:
    """Return a target's hub id or its folder in the repository; for other folders, its name on the command line."""
    return portable_path(model.path) or model.name


def hub_id(model: ModelConfig) -> str | None:
    """Return the hub id of a target, or of the model that a fetched file was made of; None for other folders."""
    path = model.path_or_hub_id
    if path.startswith(PACKAGE):
        return MODELS[path.removeprefix(PACKAGE)].original
    return path if is_hub_id(path) else None


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


def redact(value: Any, key: str = "") -> Any:
    """Return a copy in which every text whose key names a secret, or that looks like one, is masked."""
    if isinstance(value, Mapping):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if isinstance(value, str) and (SECRET_KEY.search(key) or SECRET_VALUE.search(value)):
        return "***"
    return value
