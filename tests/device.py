"""The device on which kernels are tested: a GPU where there is one, else the CPU, in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

T = TypeVar("T")
# the variable: to list the tests of a GPU where there is none (scripts/gpu_check.sh --dry-run)
DEVICE = torch.device(os.environ.get("HEADWAY_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu"))
ON_GPU = DEVICE.type == "cuda"
DTYPES = BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def sized(interpreted: T, gpu: T) -> T:
    """Return the sizes for this device: the interpreter is slow, and a GPU is tested with those of real models."""
    return gpu if ON_GPU else interpreted


def served(*values: Any, **marks: Any) -> Any:
    """Return parameters of a test that is about serving an 8B model in bf16: it comes first on a GPU."""
    return pytest.param(*values, marks=pytest.mark.gpu(served=True, **marks))


def orders(config: pytest.Config) -> dict[str, Any]:
    """Return what tests/gpu_check tells this process, if it runs the tests."""
    return config.getoption("gpu_orders", None) or {}


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


@contextmanager
def variants_compiled() -> Iterator[set[str]]:
    """Collect "<kernel> <hash>" of every variant compiled, or found in Triton's cache, within the block."""
    from triton import knobs

    variants: set[str] = set()

    def listen(*, src: Any, metadata: dict[str, Any], **other: Any) -> None:
        variants.add(f"{src.name} {metadata['hash']}")

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield variants
    finally:
        knobs.compilation.listener = before
