"""Checks that all schemas share, and the base of a config's relative paths. Knows nothing about the keys.

A bound on one key is declared with its default, as in `port: int = number(8000, low=0, high=65535)`; `check_fields`
holds a config to all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parent.parent
ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9A-Fa-f:]+\](:[0-9]{1,5})?")
FREE_TEXT = {"free_text": True}  # a field whose value on the command line is always taken literally


def bounded(default: Any, wanted: str, holds: Callable[[Any], bool]) -> Any:
    """Return a dataclass field whose value must satisfy `holds`; in a list every item must. None always may be."""
    metadata = {"bound": (wanted, holds)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def choice(default: Any, *choices: str) -> Any:
    return bounded(default, f"must be one of {', '.join(choices)}", lambda value: value in choices)


def number(default: Any, *, low: float | None = None, above: float | None = None, high: float | None = None) -> Any:
    """Return a field from `low`, or above `above`, to `high`, all of them allowed but `above`."""
    lower = f"at least {low}" if above is None else f"above {above}"
    wanted = lower if high is None else f"{low} to {high}" if above is None else f"{lower} and at most {high}"

    def holds(value: float) -> bool:  # False for NaN
        return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)

    return bounded(default, f"must be {wanted}", holds)


def check_fields(config: Any, group: str = "") -> None:
    """Raise ValueError for the first value out of its field's bound. `group`: what its key begins with, `server.`"""
    for key in fields(config):
        wanted, holds = key.metadata.get("bound", ("", None))
        value = getattr(config, key.name)
        for item in value if isinstance(value, list) else [value]:
            if holds is not None and item is not None and not holds(item):
                raise ValueError(f"{group}{key.name}={item}: {wanted}")


def one_of(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value}: must be one of {', '.join(choices)}")


def at_least(key: str, value: float | None, low: float) -> None:
    """Raise ValueError below `low`. None passes: for a key that may be null, null has its own meaning."""
    if value is not None and not value >= low:  # written so that NaN fails
        raise ValueError(f"{key}={value}: must be at least {low}")


def check_origins(key: str, origins: Sequence[str]) -> None:
    """Check values of the `origin` header that a browser sends: scheme, host and port, without a path."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ValueError(f"{key}={origin}: must be *, or http(s)://host[:port], without a path")
    if "*" in origins and len(origins) > 1:
        raise ValueError(f"{key}={list(origins)}: * stands for every origin; leave out the others")


def resolve_path(path: str) -> Path:
    """Resolve a config's path relative to the repository, so that a command means the same from any folder."""
    return REPO_ROOT / Path(path).expanduser()
