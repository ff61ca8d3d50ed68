"""What the interpreter is patched for holds under every version of Triton that pyproject.toml allows."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import triton
import triton.language as tl

import kernels.triton  # noqa: F401
from tests.kernels.triton.compiled import INSTALLED, NEWEST, OLDEST, run_in_new_process


@triton.jit
def extremes(x, out, count, N: tl.constexpr):
    """Of x and 1 the larger and the smaller, x again where `count` is above 2, and the sum of `count` ones."""
    index = tl.arange(0, N)
    value = tl.load(x + index)
    tl.store(out + index, tl.maximum(value, 1.0))
    tl.store(out + N + index, tl.minimum(value, 1.0), mask=count > 2)
    tl.store(out + 2 * N + index, tl.load(x + index, mask=count < 2, other=7.0))
    total = 0.0
    for _ in range(tl.load(x + N).to(tl.int32)):
        total += 1.0
    tl.store(out + 3 * N, total)


def main() -> None:
    out = torch.zeros(7)
    extremes[1,](torch.tensor([torch.nan, -2.0, 3.0]), out, 5, N=2)
    print(json.dumps({"extremes": out.tolist()}))


@pytest.mark.parametrize("version", [INSTALLED, OLDEST, NEWEST])
def test_nan_masks_of_scalars_and_bounds_of_loops(version):
    """The larger and the smaller of a number and NaN are the number, as on a GPU."""
    result = run_in_new_process("tests.kernels.triton.test_interpreter", triton=version, interprets=True)
    assert result["extremes"] == [1.0, 1.0, 1.0, -2.0, 7.0, 7.0, 3.0]


if __name__ == "__main__":
    sys.exit(main())
