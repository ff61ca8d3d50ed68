"""Patches Triton's interpreter to sum and round as a GPU does.

Its `tl.dot` is numpy's matmul, for which BLAS sums in an order that depends on the shape and on a row's index, so that
bitwise exactness cannot be tested. A tensor core's sum depends on the two vectors alone; here products are summed along
K one after another. The interpreter's conversion from fp32 to fp8 also loses the carry where a mantissa rounds up to
the next power of two, and its conversion from fp8 (e4m3) makes 480 of NaN. Triton 3.6's makes an int of an array of one
element, which numpy has refused since 2.5. Up to 3.7 the larger of a number and NaN is NaN, where a GPU returns the
number. 3.9's loads and stores refuse a mask that was made of a scalar, of which the interpreter makes integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot = InterpreterBuilder.create_dot


def dot_in_order(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """a `[M, K]`, b `[K, N]`, d `[M, N]` -> d + a b. 8-bit floats and batches use the interpreter's original."""
    if a.data.ndim != 2 or a.dtype.primitive_bitwidth == 8 or b.dtype.primitive_bitwidth == 8:
        return _dot(builder, a, b, d, *options)
    assert tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar), "the interpreter keeps bf16 as integers: upcast first"
    left, right = (np.ascontiguousarray(x.data, dtype=d.data.dtype) for x in (a, b))
    out = d.data + np.einsum("mk,kn->mn", left, right)  # not optimised, so it sums along k, vectorised over n
    return TensorHandle(out, d.dtype.scalar)


InterpreterBuilder.create_dot = dot_in_order  # type: ignore[method-assign]
InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)  # type: ignore[method-assign]
InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)  # type: ignore[method-assign]
_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


def as_mask(mask: Any) -> Any:
    return TensorHandle(mask.data.astype(bool), mask.dtype)


def masked_load(builder: Any, pointers: Any, mask: Any, *options: Any) -> Any:
    return _load(builder, pointers, as_mask(mask), *options)


def masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
    return _store(builder, pointers, value, as_mask(mask), *options)


InterpreterBuilder.create_masked_load = masked_load  # type: ignore[method-assign]
InterpreterBuilder.create_masked_store = masked_store  # type: ignore[method-assign]
_convert_float = interpreter._convert_float


TORCH = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}


def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Convert to the bits of `target`; to fp8 (e4m3) with torch's rounding, and from it with NaN."""
    if source == tl.float8e4nv and target in TORCH:
        wide = torch.from_numpy(data.view(np.uint8).copy()).view(torch.float8_e4m3fn).to(TORCH[target])
        return wide.view(torch.uint8).numpy().view(f"uint{target.primitive_bitwidth}").reshape(data.shape)
    if source != tl.float32 or target != tl.float8e4nv:
        return _convert_float(data, source, target, rounding)
    narrow = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(torch.float8_e4m3fn)
    return narrow.view(torch.uint8).numpy().reshape(data.shape)


interpreter._convert_float = convert_float
_patch_lang_tensor = interpreter._patch_lang_tensor


def patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Give tensors their methods, with the `__index__` of Triton 3.7."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


interpreter._patch_lang_tensor = patch_lang_tensor
