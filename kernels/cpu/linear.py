"""Linear layers in C from weights of 4 or 8 bits (linear.c): one order along K for every number of rows."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import KINDS, library, openmp
from kernels.quantise import NarrowFormat

FORMATS = {"int4": 0, "int8": 1, "fp8": 2}  # linear.c
PANEL = 64  # outputs that it works on at once
CHUNK = 64 * PANEL  # outputs packed at a time, which takes 32 bits a weight
PARALLEL_WORK = 2**18  # multiply-adds below which waking a second thread costs more than it saves


class Arguments(ctypes.Structure):
    """linear_args of linear.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "words", "scale", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "group", "format", "x_kind", "out_kind")),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("self", ctypes.c_void_p),
    )


def supported(inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype in KINDS and inputs % 8 == 0 and library() is not None


class NativeLinear:
    """stored `[N, K]` and scale `[N]` or `[N, K / group]` as `quantise` answers them; for rows of `dtype`."""

    def __init__(
        self, stored: Tensor, scale: Tensor, bias: Tensor | None, weight_format: NarrowFormat, dtype: torch.dtype
    ) -> None:
        found = library()
        assert found is not None
        self._call, self._runtime = found.linear, openmp()
        self._dtype, (self._outputs, inputs) = dtype, stored.shape
        self._x_dtype = dtype if dtype is torch.float32 or found.linear_takes_bf16() else torch.float32
        scale = scale.view(self._outputs, -1)
        self._words, self._scale = packed(stored, weight_format), panels(scale)
        self._bias = None if bias is None else panels(bias.float()[:, None])
        self._fixed = {
            "words": self._words.data_ptr(),
            "scale": self._scale.data_ptr(),
            "bias": self._bias.data_ptr() if self._bias is not None else None,
            "inputs": inputs,
            "outputs": self._outputs,
            "group": inputs // scale.shape[1],
            "format": FORMATS[weight_format],
            "x_kind": KINDS[self._x_dtype],
            "out_kind": KINDS[dtype],
            "parallel": self._runtime and self._runtime[0],
            "self": self._runtime and self._runtime[1],
        }
        self.bytes = 4 * (self._words.numel() + self._scale.numel())

    def __call__(self, rows: Tensor) -> Tensor:
        """`[R, K]` -> `[R, N]`."""
        rows = rows.to(self._x_dtype).contiguous()
        count, inputs = rows.shape
        out = torch.empty(count, self._outputs, dtype=self._dtype)
        many = self._runtime is not None and count * inputs * self._outputs > PARALLEL_WORK
        threads = torch.get_num_threads() if many else 1
        own = Arguments(x=rows.data_ptr(), out=out.data_ptr(), rows=count, threads=threads, **self._fixed)
        self._call(ctypes.addressof(own))
        return out


def panels(values: Tensor) -> Tensor:
    """`[N, C]` -> `[N / 64, C, 64]`, the last panel filled with zeros."""
    filled = F.pad(values, (0, 0, 0, -len(values) % PANEL))
    return filled.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def packed(stored: Tensor, weight_format: NarrowFormat) -> Tensor:
    """`[N, K]` in 8 bits -> words `[N / 64, K / held, 64]` int32, each of `held` weights, in pairs (linear.c)."""
    bits = 4 if weight_format == "int4" else 8
    held = 32 // bits
    found = []
    for rows in stored.split(CHUNK):
        values = panels(rows.view(torch.uint8).int() & (2**bits - 1)).unflatten(1, (-1, held))
        words = torch.zeros_like(values[:, :, 0])
        for place in range(held):
            words |= values[:, :, place] << (bits * (place // 2) + 16 * (place % 2))
        found.append(words)
    return torch.cat(found)
