"""Makes Triton's interpreter add as a GPU does: in one order, whatever the shape of a product.

Its `tl.dot` is numpy's matmul, where BLAS sums in an order that depends on the shape and on where in it a row lies, so
that no exactness could be tested. A tensor core's sum depends on the two vectors alone. Here it runs along K, one
product after another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot = InterpreterBuilder.create_dot


def dot_in_order(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """a `[M, K]`, b `[K, N]`, d `[M, N]` -> d + a b. 8-bit floats and batches stay with the interpreter's own."""
    if a.data.ndim != 2 or a.dtype.primitive_bitwidth == 8 or b.dtype.primitive_bitwidth == 8:
        return _dot(builder, a, b, d, *options)
    assert tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar), "the interpreter keeps bf16 as integers: upcast first"
    left, right = (np.ascontiguousarray(x.data, dtype=d.data.dtype) for x in (a, b))
    out = d.data + np.einsum("mk,kn->mn", left, right)  # not optimised: along k for a whole line of n at a time
    return TensorHandle(out, d.dtype.scalar)


InterpreterBuilder.create_dot = dot_in_order  # type: ignore[method-assign]
