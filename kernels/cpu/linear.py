"""Linear layers in C (linear.c), with one summation order along K for any number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.declarations import fields
from kernels.cpu.library import KINDS, address, library, threads
from kernels.cpu.memory import zeros
from kernels.quantize import NarrowFormat

# of the words, as in widen.h, and of the scales, as in scales.h
FORMATS = {"int4": 0, "int8": 1, "fp8": 2, "uint4": 4, "int5": 5, "uint5": 6, "int6": 7}
WIDE = {torch.float32: 3, torch.bfloat16: 8}  # the format of weights in the dtype of the rows, "same"
SCALES = {"float_scale": 0, "half_scale": 1, "half_offset": 2, "super_offset": 3, "super_scale": 4}
SCALES |= {"bf16_scale": 5, "float_zero": 6, "half_zero": 7, "bf16_zero": 8}
PANEL, WIDE_PANEL = 64, 32  # outputs that linear.c computes at once; the second for unquantized weights
# formats that linear_integer.c multiplies: the weights of a sum of integers, a divisor of their groups
INTEGERS = {"int4": 32, "uint4": 32, "int5": 32, "uint5": 32, "int6": 16, "int8": 32}
QUANTIZED = 32  # inputs of a row that share a scale there
PACKED_ROWS, FILLED_ROWS = 96, 24  # rows that a thread processes at once; a multiple of every tile's rows
CHUNK = 64 * PANEL  # outputs packed at a time, since packing needs 32 bits per weight


class Arguments(ctypes.Structure):
    """linear_args of linear.h."""

    __slots__ = ()
    _fields_ = fields("linear_args")


class PackArguments(ctypes.Structure):
    """pack_args of pack.c."""

    __slots__ = ()
    _fields_ = fields("pack_args")


def supported(inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    lib = library() if device.type == "cpu" and dtype in KINDS and inputs % 8 == 0 else None
    return lib is not None


class Segment(NamedTuple):
    """Outputs of a layer whose weights are stored in one format, packed for linear.c."""

    words: Tensor  # int32 [panels, words of a row, 64 or 32]
    scale: Tensor | None
    outputs: int
    group: int  # weights that share a scale
    weight_format: str  # of FORMATS
    scales: str = "float_scale"  # of SCALES
    order: Tensor | None = None  # int32 [K] the column of each input of `words`; None: in order


class NativeLinear:
    """A linear layer of `inputs` for rows of `dtype`, whose outputs are those of its segments in order."""

    def __init__(self, segments: Sequence[Segment], inputs: int, bias: Tensor | None, dtype: torch.dtype) -> None:
        lib = library()
        assert lib is not None
        self._call = lib.linear
        self.segments, self.dtype, self._inputs = segments, dtype, inputs
        self._outputs = sum(segment.outputs for segment in segments)
        narrow = segments[0].weight_format != "same"
        ends = list(accumulate((segment.outputs for segment in segments), initial=0))
        self._biases = [
            None if bias is None else panels(bias[first:end, None].float()) for first, end in pairwise(ends)
        ]
        # words per row and thread: x, perhaps once more reordered or widened, and with scales its sum over each group
        widened = dtype is torch.bfloat16 and not lib.linear_takes_bf16()
        copied = widened or any(each.order is not None for each in segments)
        words = inputs * (4 if widened else dtype.itemsize) // 4 * (1 + copied)
        self.scratch = words + max(inputs // each.group if narrow else 0 for each in segments)
        first, *others = (
            {
                "words": segment.words.data_ptr(),
                "scale": address(segment.scale),
                "bias": address(bias_panels),
                "order": address(segment.order),
                "inputs": inputs,
                "outputs": segment.outputs,
                "group": segment.group,
                "format": FORMATS.get(segment.weight_format, WIDE[dtype]),
                "scales": SCALES[segment.scales],
                "x_kind": KINDS[dtype],
                "out_kind": KINDS[dtype],
                "stride": self._outputs,
                "column": column,
                "scratch_words": self.scratch,
            }
            for segment, bias_panels, column in zip(segments, self._biases, ends, strict=False)
        )
        self._others, after = list[Arguments](), 0
        for other in reversed(others):
            self._others.append(Arguments(**other, next=after))
            after = ctypes.addressof(self._others[-1])
        self._fixed = {**first, "next": after}
        self._arguments = Arguments(**self._fixed)  # for `__call__`, which fills in x, out, rows, scratch and threads
        stored = (tensor for each in segments for tensor in (each.words, each.scale, each.order))
        self.bytes = sum(tensor.nbytes for tensor in stored if tensor is not None)

    def quantize_rows(self) -> bool:
        """From now on quantize rows to 8 bits and multiply integers (linear_integer.c), if the weights allow it.

        Returns whether they do: all are integers, and 32 divides the inputs and each group, or 16 those of int6. Not
        after `arguments` has been read.
        """
        spans = [INTEGERS.get(segment.weight_format) for segment in self.segments]
        if self._inputs % QUANTIZED or any(
            span is None or segment.group % span for span, segment in zip(spans, self.segments, strict=True)
        ):
            return False
        # words per row and thread: four inputs each, a scale for every 32 and sums for every 16 or twice for every 32,
        # and x once more if it is reordered
        reordered = any(segment.order is not None for segment in self.segments)
        self.scratch = self._inputs // 4 + self._inputs // 32 + self._inputs // 16
        self.scratch += self._inputs * self.dtype.itemsize // 4 * reordered
        changed = {"integer": 1, "scratch_words": self.scratch}
        self._fixed |= changed
        for arguments in (self._arguments, *self._others):
            for field, value in changed.items():
                setattr(arguments, field, value)
        return True

    @property
    def arguments(self) -> Arguments:
        """Arguments for C callers, without x, out, rows, scratch and threads."""
        return Arguments(**self._fixed)

    def copy_(self, other: NativeLinear) -> None:
        """Overwrite the weights by those of a layer of the same shape and format. Addresses stay."""
        pairs = list(zip(self._biases, other._biases, strict=True))
        for mine, theirs in zip(self.segments, other.segments, strict=True):
            pairs += [(mine.words, theirs.words), (mine.scale, theirs.scale), (mine.order, theirs.order)]
        for to, source in pairs:
            if to is not None and source is not None:
                to.copy_(source)

    def unpacked_weight(self) -> Tensor:
        """Return the weight `[N, K]` as it was passed in; only for weights without a scale."""
        (segment,) = self.segments
        assert segment.scale is None
        words = segment.words.transpose(1, 2).flatten(0, 1)[: self._outputs]
        return words.contiguous().view(self.dtype)

    def threads(self, rows: int) -> int:
        return threads(rows * self._inputs * self._outputs)

    def room(self, rows: int) -> int:
        """Return the number of scratch words that a call with this many rows needs."""
        return self.threads(rows) * scratch_rows(rows) * self.scratch

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply the layer: `[R, K]` -> `[R, N]`."""
        rows = rows.to(self.dtype).contiguous()
        count = rows.shape[0]
        out = torch.empty(count, self._outputs, dtype=self.dtype)
        args, scratch = self._arguments, torch.empty(self.room(count), dtype=torch.int32)
        args.x, args.out, args.rows, args.threads = rows.data_ptr(), out.data_ptr(), count, self.threads(count)
        args.scratch = scratch.data_ptr()
        self._call(ctypes.addressof(args))
        return out

    def weight_rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` int64 `[R]` of a weight in blocks, `[R, K]`, each value rounded once. One segment only."""
        lib, (segment,) = library(), self.segments
        assert lib is not None
        assert segment.scales != "float_scale"
        ids = ids.contiguous()
        out = torch.empty(len(ids), self._inputs, dtype=self.dtype)
        lib.blocks_gather(ctypes.addressof(self._arguments), ids.data_ptr(), len(ids), out.data_ptr())
        return out


def scratch_rows(rows: int) -> int:
    """Return for how many rows a thread needs scratch: tiles are filled up."""
    return min(rows + -rows % FILLED_ROWS, PACKED_ROWS)


def dense_segment(weight: Tensor) -> Segment:
    """Pack a weight `[N, K]` in the dtype of the rows."""
    outputs, inputs = weight.shape
    return Segment(wide_panels(weight), None, outputs, inputs, "same")


def quantized_segment(stored: Tensor, scale: Tensor, weight_format: NarrowFormat) -> Segment:
    """Pack the output of `quantize`: `stored` `[N, K]`, `scale` `[N]` or `[N, K / group]`."""
    scale = scale.view(len(stored), -1)
    group = stored.shape[1] // scale.shape[1]
    return Segment(packed(stored, weight_format), panels(scale), len(stored), group, weight_format)


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


def packed(stored: Tensor, weight_format: NarrowFormat, order: Tensor | None = None) -> Tensor:
    """Pack 8-bit `[N, K]` -> words `[N / 64, K / per_word, 64]` int32, `per_word` in each, in pairs (widen.h).

    `order` int32 `[K]`: the column of each input.
    """
    lib, (outputs, inputs), bits = library(), stored.shape, 4 if weight_format == "int4" else 8
    assert lib is not None
    stored = stored.contiguous()
    out = zeros((-(-outputs // PANEL), inputs * bits // 32, PANEL), torch.int32)
    arguments = PackArguments(
        values=stored.data_ptr(),
        order=address(order),
        words=out.data_ptr(),
        inputs=inputs,
        outputs=outputs,
        bits=bits,
        threads=threads(outputs * inputs),
    )
    lib.pack_numbers(ctypes.addressof(arguments))
    return out
