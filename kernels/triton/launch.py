# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
"""Launches kernels: a compiled variant is looked up by what selects it, in a tenth of the time of Triton's own launch.

Triton binds arguments by name, examines each constant and option, and joins all of that to a string at every launch.
Here constants and options are fixed when a `Variant` is made, once per layer and tile, and a launch examines only what
differs between calls: types and alignment of tensors, whether an integer is 1 or a multiple of 16, the current device.
The first launch of each such kind is Triton's own, which compiles, and returns what later ones call directly.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

LIMIT = 2**31  # integers from here on are passed in 64 bits


class Variant:
    """A kernel, its constants and options. `constants` are all of its constexpr parameters, which come last."""

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: Any) -> None:
        self._kernel, self._named = kernel, {**constants, **options}
        self._compiled: dict[tuple[object, ...], Any] = {}
        parameters = getattr(kernel, "params", [])  # none in the interpreter
        self._specialized = [not each.do_not_specialize for each in parameters if not each.is_constexpr]
        self._constants = tuple(constants[each.name] for each in parameters if each.is_constexpr)

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch `grid` programs on the current stream of the current device, with all but the constants."""
        compiled = None
        if self._compiled:
            device = driver.active.get_current_device()
            compiled = self._compiled.get((device, *map(kind, arguments, self._specialized)))
        if compiled is None or observed(self._kernel):
            self._launch_by_triton(grid, arguments)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        fixed = stream, compiled.function, compiled.packed_metadata, None, None, None  # neither metadata nor hooks
        compiled.run(x, y, z, *fixed, *arguments, *self._constants)

    def _launch_by_triton(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        compiled = self._kernel[grid](*arguments, **self._named)
        if compiled is not None:  # as in the interpreter
            device = driver.active.get_current_device()
            self._compiled[device, *map(kind, arguments, self._specialized)] = compiled


def kind(argument: Any, specialized: bool) -> object:
    """Return what Triton compiles a kernel apart for: see its `specialize_impl`."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        wide = not -LIMIT <= argument < LIMIT
        return (wide, argument % 16 == 0, argument == 1) if specialized else wide
    return type(argument)  # a float, or None


def observed(kernel: Any) -> bool:
    """Return whether something is to be called at each launch, such as a profiler, which Triton's own launch does."""
    runtime = knobs.runtime
    return bool(_set(runtime.launch_enter_hook) or _set(runtime.launch_exit_hook) or kernel.pre_run_hooks)


def _set(hook: Any) -> bool:
    """A hook is a function, None or a chain of functions."""
    return hook is not None and bool(getattr(hook, "calls", True))
