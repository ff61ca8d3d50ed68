"""Linear layers in C (linear.c), with one summation order along K for any number of rows."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.declarations import fields
from kernels.cpu.library import KINDS, address, library, threads
from kernels.cpu.memory import zeros
from kernels.quantise import NarrowFormat, WeightFormat

FORMATS = {"int4": 0, "int8": 1, "fp8": 2, "same": 3}  # as in linear.c
PANEL, WIDE_PANEL = 64, 32  # outputs that linear.c computes at once; the second for unquantised weights
PACKED_ROWS = 96  # rows that a thread processes at once with unquantised weights
CHUNK = 64 * PANEL  # outputs packed at a time, since packing needs 32 bits per weight


class Arguments(ctypes.Structure):
    """linear_args of linear.h."""

    __slots__ = ()
    _fields_ = fields("linear_args")


def supported(inputs: int, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat) -> bool:
    lib = library() if device.type == "cpu" and dtype in KINDS and inputs % 8 == 0 else None
    return lib is not None and (weight_format != "same" or bool(lib.linear_takes_wide()))


class NativeLinear:
    """A linear layer for rows of `dtype`.

    With a scale, `stored` `[N, K]` and `scale` `[N]` or `[N, K / group]` are the output of `quantise`; without one,
    `stored` is the weight in `dtype`.
    """

    def __init__(
        self,
        stored: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        weight_format: WeightFormat,
        dtype: torch.dtype,
    ) -> None:
        lib = library()
        assert lib is not None
        self._call = lib.linear
        self.dtype, (self._outputs, self._inputs) = dtype, stored.shape
        widened = weight_format != "same" and not lib.linear_takes_bf16()
        self._x_dtype = torch.float32 if widened else dtype
        self._scale, groups = None, 1
        if weight_format == "same":
            self._words = wide_panels(stored)
        else:
            assert scale is not None
            scale = scale.view(self._outputs, -1)
            self._words, self._scale, groups = packed(stored, weight_format), panels(scale), scale.shape[1]
        self._bias = None if bias is None else panels(bias.float()[:, None])
        self.scratch = 0 if weight_format != "same" else PACKED_ROWS * self._words.shape[1]  # words per thread
        self._fixed = {
            "words": self._words.data_ptr(),
            "scale": address(self._scale),
            "bias": address(self._bias),
            "inputs": self._inputs,
            "outputs": self._outputs,
            "group": self._inputs // groups,
            "format": FORMATS[weight_format],
            "x_kind": KINDS[self._x_dtype],
            "out_kind": KINDS[dtype],
        }
        self._arguments = Arguments(**self._fixed)  # for `__call__`, which fills in x, out, rows, scratch and threads
        self.bytes = 4 * (self._words.numel() + (self._scale.numel() if self._scale is not None else 0))

    @property
    def arguments(self) -> Arguments | None:
        """Arguments for C callers, without x, out, rows, scratch and threads; None if rows must first become fp32."""
        return Arguments(**self._fixed) if self._x_dtype is self.dtype else None

    def copy_(self, other: NativeLinear) -> None:
        """Overwrite the weights by those of a layer of the same shape and format. Addresses stay."""
        pairs = (self._words, other._words), (self._scale, other._scale), (self._bias, other._bias)
        for mine, theirs in pairs:
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def unpacked_weight(self) -> Tensor:
        """Return the weight `[N, K]` as it was passed in; only for weights without a scale."""
        assert self._scale is None
        words = self._words.transpose(1, 2).flatten(0, 1)[: self._outputs]
        return words.contiguous().view(self.dtype)

    def threads(self, rows: int) -> int:
        return threads(rows * self._inputs * self._outputs)

    def room(self, rows: int) -> int:
        """Return the number of scratch words that a call with this many rows needs."""
        return self.threads(rows) * self.scratch if rows > 1 else 0

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply the layer: `[R, K]` -> `[R, N]`."""
        rows = rows.to(self._x_dtype).contiguous()
        count = rows.shape[0]
        out = torch.empty(count, self._outputs, dtype=self.dtype)
        args, scratch = self._arguments, torch.empty(self.room(count), dtype=torch.int32)
        args.x, args.out, args.rows, args.threads = rows.data_ptr(), out.data_ptr(), count, self.threads(count)
        args.scratch = scratch.data_ptr()
        self._call(ctypes.addressof(args))
        return out


def panels(values: Tensor, size: int = PANEL) -> Tensor:
    """`[N, C]` -> `[N / size, C, size]`, the last panel padded with zeros."""
    filled = F.pad(values, (0, 0, 0, -len(values) % size))
    return filled.unflatten(0, (-1, size)).transpose(1, 2).contiguous()


def wide_panels(weight: Tensor) -> Tensor:
    """Pack `[N, K]` in fp32 or bf16 -> words `[N / 32, K, 32]` or `[N / 32, K / 2, 32]` int32."""
    count, words = len(weight), weight.contiguous().view(torch.int32)
    out = zeros((-(-count // WIDE_PANEL), words.shape[1], WIDE_PANEL), torch.int32)
    for first in range(0, count, CHUNK):
        rows = words[first : first + CHUNK]
        out[first // WIDE_PANEL : -(-(first + len(rows)) // WIDE_PANEL)] = panels(rows, WIDE_PANEL)
    return out


def packed(stored: Tensor, weight_format: NarrowFormat) -> Tensor:
    """Pack 8-bit `[N, K]` -> words `[N / 64, K / per_word, 64]` int32, `per_word` in each, in pairs (linear.c)."""
    bits = 4 if weight_format == "int4" else 8
    per_word = 32 // bits
    out = zeros((-(-len(stored) // PANEL), stored.shape[1] // per_word, PANEL), torch.int32)
    for words, rows in zip(out.split(CHUNK // PANEL), stored.split(CHUNK), strict=True):
        values = panels(rows.view(torch.uint8).int() & (2**bits - 1)).unflatten(1, (-1, per_word))
        for index in range(per_word):
            words |= values[:, :, index] << (bits * (index // 2) + 16 * (index % 2))
    return out
