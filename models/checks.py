"""Checks of settings: errors name the key, its value and what is allowed. Knows nothing about the keys.

Bounds are declared with their defaults, `port: int = number(8000, low=0, high=65535)`. A schema calls `check_fields` in
`__post_init__`, and checks there what concerns several keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from pathlib import Path
from typing import Any

MISSING: Any = "???"  # the default of a key that must be given; Hydra's and OmegaConf's word for it


def one_of(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value}: must be one of {', '.join(choices)}")


def at_least(key: str, value: float | None, low: float) -> None:
    """Raise ValueError below `low`. None passes: for a key that may be null, null has its own meaning."""
    if value is not None and not value >= low:  # written so that NaN fails
        raise ValueError(f"{key}={value}: must be at least {low}")


def bounded(default: Any, wanted: str, holds: Callable[[Any], object]) -> Any:
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


def home_path(text: str) -> Path:
    """Return the path, a leading ~ expanded. Raises ValueError if that user has no home folder on this machine."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{text}: {text.partition('/')[0]} is no user with a home folder; write the whole path"
        ) from None
