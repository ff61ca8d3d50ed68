"""Requests come and go: admission, scheduling, one step, and what is said of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Loads the engine when it is asked for, so that a module of this package can be imported without all of them."""
    if name == "Engine":
        from infer.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
