"""Counts what a computation launches on a GPU: torch operations and Triton kernels, in Triton's interpreter.

Without a GPU an operation counts if it would be a kernel there: views, and allocations without a fill, are not. What
the interpreter itself does with torch is left out.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

ROOT = Path(__file__).resolve().parents[1]
ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Launches(TorchDispatchMode):
    """`names`: how often each torch operation and Triton kernel was launched. `places`: by the lines that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.places: Counter[tuple[str, str]] = Counter()

    @property
    def total(self) -> int:
        return sum(self.names.values())

    def add(self, name: str) -> None:
        self.names[name] += 1
        files = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_stack()]
        lines = [f"{file.relative_to(ROOT)}:{line}" for file, line in files if file.is_relative_to(ROOT)]
        lines = [line for line in lines if not line.startswith((".venv", "tests"))]
        self.places[name, " < ".join(lines[:-4:-1])] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            out = func.decompose(*args, **kwargs)  # into the operations that have kernels
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if not (name in ALLOCATING or (not func._schema.is_mutable and aliases(out, args))):
            self.add(name)
        return out


def aliases(out: object, args: tuple[object, ...]) -> bool:
    """Return whether the result, or its first tensor, shares memory with the first argument."""
    first = out[0] if isinstance(out, (list, tuple)) and out else out
    if not isinstance(first, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
        return not isinstance(first, torch.Tensor)
    return first.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()


@contextmanager
def counted() -> Iterator[Launches]:
    """Count what is launched inside the block."""
    launches, run = Launches(), InterpretedFunction.run

    def counted_run(self, *args, grid, warmup, **options):
        launches.add(self.fn.__name__)
        with _disable_current_modes():
            return run(self, *args, grid=grid, warmup=warmup, **options)

    with patch.object(InterpretedFunction, "run", counted_run), launches:
        yield launches


@contextmanager
def not_run(*but: str) -> Iterator[None]:
    """Run no Triton kernel but those named: what one would have written is zero. Counts do not depend on it, and are
    had in seconds.
    """
    original = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self.fn.__name__ in but:
            original(self, *args, grid=grid, warmup=warmup, **options)

    def zeros(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            with _disable_current_modes():
                return make(*args, **kwargs).zero_()

        return call

    with (
        patch.object(InterpretedFunction, "run", run),
        patch.object(torch, "empty", zeros(torch.empty)),
        patch.object(torch, "empty_like", zeros(torch.empty_like)),
        patch.object(torch.Tensor, "new_empty", zeros(torch.Tensor.new_empty)),
    ):
        yield
