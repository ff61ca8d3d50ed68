"""Sizes for a run in Triton's interpreter (kernels/README.md), where a step takes some 200 times as long.

The tests are the same, but prompts and outputs are shorter, rounds fewer and the target smaller. `patching_once` takes
half of the interpreter's time away.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from kernels.triton import SWITCH

T = TypeVar("T")
INTERPRETED = os.environ.get(SWITCH) == "triton" and not torch.cuda.is_available()


def scaled(usual: T, interpreted: T) -> T:
    return interpreted if INTERPRETED else usual


@contextmanager
def patching_once() -> Iterator[None]:
    """Let the interpreter replace the functions of Triton's language once a launch.

    It does so in every function that a kernel calls as well, where it finds them replaced after a search of the whole
    language.
    """
    from triton import language
    from triton.runtime import interpreter

    replaced: list[tuple[set[int], Any]] = []  # modules of the language and what undoes it, outermost first
    original: Callable[[Any], Any] = interpreter._patch_lang

    class Launch(interpreter._LangPatchScope):
        """What a launch restores when it ends."""

        def restore(self) -> None:
            while replaced:
                replaced.pop()[1].restore()

    def replace(function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if inspect.ismodule(value)}
        modules &= {id(language), id(language.core)}
        if not any(modules <= before for before, _ in replaced):
            replaced.append((modules, original(function)))
        return Launch()

    with patch.object(interpreter, "_patch_lang", replace):
        yield
