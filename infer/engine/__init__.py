"""The engine: what it consists of, how it is loaded and started, and the requests that callers give it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Import `Engine` lazily, so that one module of this package can be imported without all the others."""
    if name == "Engine":
        from infer.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
