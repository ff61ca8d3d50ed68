"""Which kernels Triton would compile: one for each set of constants, dtypes, alignments and kinds of integers.

Seen in the interpreter, which compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.operations import not_run

ALIGNED = 16  # bytes of an address, and integers: Triton compiles a kernel apart for multiples


def kind(value: Any, *, specialized: bool) -> object:
    """Return what Triton compiles for, of an argument that is no constant."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % ALIGNED == 0
    if type(value) is not int:
        return value if isinstance(value, (bool, type(None))) else type(value)
    if not specialized:
        return int
    return value if value == 1 else (int, value % ALIGNED == 0)


def variant(kernel: InterpretedFunction, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, ...]:
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | options
    constants = {name for name, note in kernel.fn.__annotations__.items() if "constexpr" in str(note)}
    fixed = kernel.kwargs.get("do_not_specialize") or ()
    parts = [
        (
            name,
            value if name in constants or name not in kernel.arg_names else kind(value, specialized=name not in fixed),
        )
        for name, value in arguments.items()
    ]
    return kernel.fn.__name__, *(f"{name}={value}" for name, value in sorted(parts))


@contextmanager
def seen(*run: str) -> Iterator[set[tuple[str, ...]]]:
    """Collect the variants that are launched inside the block, in which only the kernels `run` compute anything."""
    variants = set[tuple[str, ...]]()
    with not_run(*run):
        original = InterpretedFunction.run

        def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            variants.add(variant(self, args, options))
            return original(self, *args, grid=grid, warmup=warmup, **options)

        with patch.object(InterpretedFunction, "run", record):
            yield variants
