"""Linear layers for serving. Contract: the bits of a row do not depend on how many rows share the call.

CUDA devices use one Triton kernel with a fixed summation order along K for any number of rows
(kernels/triton/linear.py, and blocks.py there for weights in blocks and groups). CPUs use a C kernel
(kernels/cpu/linear.c). What it does not read (fp16, odd sizes, no C compiler) is prepacked for oneDNN, in fp32 where a
probe shows that oneDNN lacks products of the dtype on this processor (kernels/capabilities.py). Its rows agree for
every number of rows >= 2 (checked at start-up by `assert_row_invariant`), so a single row is padded to two.
Elsewhere rows are processed in blocks of a fixed size, so that every library call has the same shape.

A layer can also activate its outputs, gate and up, or add them to the residual stream. Both have the bits of the
separate operations; on a CUDA device they take no launch of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.capabilities import multiply, onednn_multiplies, prepack, product_dtype
from kernels.cpu.declarations import structure
from kernels.cpu.library import library
from kernels.cpu.segments import FORMATS, SCALES, WIDE, Segment, panels, quantized_segment, wide_panels
from kernels.dispatch import KINDS, address, threads, uses_triton
from kernels.elementwise import Gate, gate_mul
from kernels.weights.ggml import GGML_FORMATS, GgmlMatrix, ggml_segments, in_blocks
from kernels.weights.ggml_tiles import GgmlTiles, pack_tiles
from kernels.weights.group_tiles import pack_group_tiles
from kernels.weights.groups import GroupedMatrix, grouped_segments, in_groups
from kernels.weights.quantize import NARROW_FORMATS, WeightFormat, quantize, widen

ROW_BLOCK = 64
WIDENED = 2**24  # weights that are widened to fp32 at a time
# formats that linear_integer.c multiplies: the weights of a sum of integers, a divisor of their groups
INTEGERS = {"int4": 32, "uint4": 32, "int5": 32, "uint5": 32, "int6": 16, "int8": 32}
QUANTIZED = 32  # inputs of a row that share a scale there
PACKED_ROWS, FILLED_ROWS = 96, 24  # rows that a thread processes at once; a multiple of every tile's rows
LinearArguments = structure("linear_args")  # of linear.h


class PackedLinear:
    """`y = x Wᵀ + b` for x `[..., K]`, W `[N, K]`; row-invariant in the sense above if `exact`. fp32, bf16 and fp16.

    A GgmlMatrix stays in its blocks (weights/ggml.py); `reads_ggml` must be true of its parts. So does a
    GroupedMatrix (weights/groups.py), of whose parts `why_unread` must be None.

    `out_dtype` fp32: the outputs are the sums themselves, without a rounding, as of an LM head, or of what is added to
    a residual stream in fp32; by default they have the dtype of the rows. Not with `gated`.

    `weight_format`: int8 and fp8 store a weight in 8 bits, int4 in 4 (weights/quantize.py), q8_0 to q4_0 in ggml's
    blocks. Where no kernel reads these (fp16 on a CPU, sizes that are no multiple of 8, no C compiler), they are
    dequantized again, which saves no memory; without oneDNN's products of 16 bits it takes that of fp32.
    Raises ValueError if no group or block size divides K, and for a damaged block.
    """

    def __init__(
        self,
        weight: Tensor | GgmlMatrix | GroupedMatrix,
        bias: Tensor | None = None,
        *,
        exact: bool = True,
        weight_format: WeightFormat = "same",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.out_dtype = weight.dtype, out_dtype or weight.dtype
        self._bias, self._exact = bias, exact
        self.narrow = weight_format != "same" or not isinstance(weight, Tensor)  # the weight is in fewer bits
        self.native: NativeLinear | None = None
        self._tiles: Sequence[GgmlTiles] = ()
        if weight_format in GGML_FORMATS:
            assert isinstance(weight, Tensor)
            weight = in_blocks(weight, weight_format)
        self._triton = uses_triton(weight.device) and (exact or self.narrow)
        narrow = weight_format if weight_format in NARROW_FORMATS else None
        if narrow is not None and self._triton:
            assert isinstance(weight, Tensor)
            weight = in_groups(weight, narrow)
        if not isinstance(weight, Tensor):
            self._pack_stored(weight, bias)
            return
        dtype, device = weight.dtype, weight.device
        native = not self._triton and runs_in_c(self.in_features, dtype, device)
        scale = None
        if narrow is not None:
            weight, scale = quantize(weight, narrow)
            if not native:
                weight = widen(weight, scale).to(dtype)
        if native:
            if narrow is None:
                segment = Segment(wide_panels(weight), None, len(weight), weight.shape[1], "same")
            else:
                assert scale is not None
                segment = quantized_segment(weight, scale, narrow)
            self._pack_native([segment], bias)
            return
        self._onednn = False
        if self._triton:
            self._weight = weight.contiguous()
        elif device.type == "cpu":
            weight = weight.to(product_dtype(dtype) if self.out_dtype is dtype else self.out_dtype)
            self._onednn = onednn_multiplies(weight.dtype)
            self._weight = prepack(weight) if self._onednn else weight
        else:
            self._weight = weight
        self.bytes = weight.numel() * weight.element_size()

    def _pack_stored(self, weight: GgmlMatrix | GroupedMatrix, bias: Tensor | None) -> None:
        grouped = isinstance(weight, GroupedMatrix)
        if self._triton:
            self._tiles = pack_group_tiles(weight) if grouped else pack_tiles(weight)
            self.bytes = sum(tiles.bytes for tiles in self._tiles)
        else:
            segments = grouped_segments(weight) if grouped else ggml_segments(weight)
            self._pack_native(segments, bias)

    def _pack_native(self, segments: Sequence[Segment], bias: Tensor | None) -> None:
        self.native = NativeLinear(segments, self.in_features, bias, self.dtype, self.out_dtype)
        self.bytes = self.native.bytes

    def quantize_rows(self) -> bool:
        """From now on quantize rows to 8 bits and multiply integers (cpu/linear_integer.c), if the weights allow it.

        Returns whether they do: weights in blocks, int8 and int4 that C reads, if 32 divides K. It is another rounding,
        row-invariant like the default. Nothing may have read `native.arguments` before.
        """
        return self.native is not None and self.native.quantize_rows()

    @property
    def on_cpu(self) -> bool:
        return self.native is not None or (not self._triton and self._weight.device.type == "cpu")

    @property
    def kernel(self) -> str:
        """What computes this layer, for people."""
        if self.native is not None:
            return "a kernel in C"
        if self._triton:
            return "Triton"
        library = "oneDNN" if self._onednn else "torch"
        widened = self._weight.dtype is not self.dtype
        return f"{library} in {str(self._weight.dtype).removeprefix('torch.')}" if widened else library

    @property
    def formats(self) -> tuple[str, ...]:
        """How kernels in C, and those of blocks and groups, find the weights stored, from first output to last."""
        segments = [] if self.native is None else self.native.segments
        stored = [f"{segment.weight_format} {segment.scales}" for segment in segments]
        return (*stored, *(tiles.ggml_format for tiles in self._tiles))

    def copy_(self, other: PackedLinear) -> None:
        """Overwrite the weight by that of a layer of the same shape and format, packed in the same process.

        What reads it by its address, a CUDA graph or a kernel in C, goes on. The bias is the caller's tensor.
        """
        if self.native is not None and other.native is not None:
            self.native.copy_(other.native)
        elif self._tiles:
            for mine, theirs in zip(self._tiles, other._tiles, strict=True):
                for to, source in zip(mine.tensors, theirs.tensors, strict=True):
                    to.copy_(source)
        elif self._onednn:
            self._weight = other._weight  # opaque, and read through this object only
        else:
            self._weight.copy_(other._weight)

    def unpacked_weight(self) -> Tensor | None:
        """Return the weight `[N, K]` as it was passed in; None if it is quantized."""
        if self.narrow:
            return None
        if self.native is not None:
            return self.native.unpacked_weight()
        return (self._weight.to_dense() if self._onednn else self._weight).to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.native is not None:
            out = self.native(rows)
        elif self._triton:
            out = self._rows_triton(rows)
        else:
            out = self._rows_onednn(rows) if self._onednn else self._rows_blocked(rows)
        return out.view(*x.shape[:-1], self.out_features)

    def weight_rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` int64 `[R]` of a weight that is one part in blocks, `[R, K]`, each value rounded once."""
        if self.native is not None:
            return self.native.weight_rows(ids)
        from kernels.triton.ggml import block_rows

        (tiles,) = self._tiles
        return block_rows(tiles, ids, self.dtype)

    def whole_weight(self) -> Tensor:
        """Return all of `weight_rows`, on the weight's device."""
        device = self._tiles[0].words.device if self._tiles else None
        return self.weight_rows(torch.arange(self.out_features, device=device))

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual `[..., N]` + this layer's output for x `[..., K]`."""
        if not self._triton or residual.dtype is not self.out_dtype:
            return residual + self(x)
        before = residual.reshape(-1, self.out_features)
        return self._rows_triton(x.reshape(-1, self.in_features), residual=before).view(residual.shape)

    def gated(self, x: Tensor, gate: Gate) -> Tensor:
        """Return `gate_mul` of this layer's output for x `[..., K]`: `[..., N / 2]`."""
        if not self._triton:
            return gate_mul(self(x), gate)
        out = self._rows_triton(x.reshape(-1, self.in_features), gate=gate)
        return out.view(*x.shape[:-1], self.out_features // 2)

    def _rows_triton(self, rows: Tensor, *, residual: Tensor | None = None, gate: Gate | None = None) -> Tensor:
        if residual is not None:
            residual = adjacent(residual)
        if self._tiles:
            from kernels.triton.ggml import ggml_linear

            return ggml_linear(
                adjacent(rows), self._tiles, self._bias, residual=residual, gate=gate, out_dtype=self.out_dtype
            )
        from kernels.triton.linear import linear

        return linear(adjacent(rows), self._weight, self._bias, residual=residual, gate=gate, out_dtype=self.out_dtype)

    def _rows_onednn(self, rows: Tensor) -> Tensor:
        count, dtype = rows.shape[0], self._weight.dtype
        if count == 1:
            rows = rows.expand(2, -1)
        return multiply(rows.to(dtype), self._weight, self._wide_bias(dtype))[:count].to(self.out_dtype)

    def _rows_blocked(self, rows: Tensor) -> Tensor:
        count, dtype = rows.shape[0], self._weight.dtype
        rows, bias = rows.to(dtype), self._wide_bias(dtype)
        blocks = F.pad(rows, (0, 0, 0, -count % ROW_BLOCK)).split(ROW_BLOCK) if self._exact else (rows,)
        product = F.linear if self.out_dtype.itemsize <= dtype.itemsize else wide_linear
        outs = [product(block, self._weight, bias) for block in blocks]
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[:count].to(self.out_dtype)

    def _wide_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the bias, which is the caller's tensor and may change, in the dtype of the product."""
        return None if self._bias is None else self._bias.to(dtype)


def wide_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows `[R, K]` times Wᵀ, + b, in fp32 of weights `[N, K]` in 16 bits, whose products fp32 holds exactly."""
    out = WideProduct.apply(rows.to(weight.dtype), weight)
    return out if bias is None else out + bias.float()


class WideProduct(torch.autograd.Function):
    """The sums of `wide_linear`. Gradients are products in the dtype of the weights, as those of F.linear."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, weight)
        if rows.is_cuda:
            return torch.mm(rows, weight.t(), out_dtype=torch.float32)
        with torch.autocast(rows.device.type, enabled=False):  # no library of a CPU keeps these sums: widen a part
            parts = weight.split(max(1, WIDENED // weight.shape[1]))
            return torch.cat([F.linear(rows.float(), part.float()) for part in parts], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        grad, (for_rows, for_weight) = grad.to(weight.dtype), ctx.needs_input_grad
        return grad @ weight if for_rows else None, grad.t() @ rows if for_weight else None


def adjacent(rows: Tensor) -> Tensor:
    """Return `[R, C]` with a stride of 1 along C."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def reads_narrow(inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a kernel reads 8- and 4-bit weights directly for rows of `dtype`; if not, they are dequantized."""
    return uses_triton(device) or runs_in_c(inputs, dtype, device)


def assert_row_invariant(linear: PackedLinear, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Check the contract on this machine: 1 to 64 rows against the same rows among 200.

    Returns the output of the 200 rows. Raises ValueError if bits differ.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, linear.in_features, generator=generator).to(device, dtype)
    expected = linear(x)
    for count in (1, 2, 3, 5, 8, 17, 32, 64):
        if not torch.equal(linear(x[:count]), expected[:count]):
            raise ValueError(
                f"engine.exact=true: on this machine a linear layer of {linear.in_features}x{linear.out_features} "
                f"({dtype}) gives other bits for {count} rows than for 200; engine.exact=false serves without it"
            )
    return expected


def linear_arguments(linear: PackedLinear) -> ctypes.Structure:
    """Return the structure `linear_args` of weights that C reads."""
    assert linear.native is not None
    return linear.native.arguments


def runs_in_c(inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    lib = library() if device.type == "cpu" and dtype in KINDS and inputs % 8 == 0 else None
    return lib is not None


class NativeLinear:
    """A linear layer of `inputs` for rows of `dtype`, whose outputs are those of its segments in order.

    `out_dtype`: as of a PackedLinear.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        inputs: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        lib = library()
        assert lib is not None
        self._call = lib.linear
        self.segments, self.dtype, self.out_dtype, self._inputs = segments, dtype, out_dtype or dtype, inputs
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
                "out_kind": KINDS[self.out_dtype],
                "stride": self._outputs,
                "column": column,
                "scratch_words": self.scratch,
            }
            for segment, bias_panels, column in zip(segments, self._biases, ends, strict=False)
        )
        self._others, after = list[ctypes.Structure](), 0
        for other in reversed(others):
            self._others.append(LinearArguments(**other, next=after))
            after = ctypes.addressof(self._others[-1])
        self._fixed = {**first, "next": after}
        self._arguments = LinearArguments(**self._fixed)  # of `__call__`, which adds x, out, rows, scratch and threads
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
    def arguments(self) -> ctypes.Structure:
        """Arguments for C callers, without x, out, rows, scratch and threads."""
        return LinearArguments(**self._fixed)

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
        out = torch.empty(count, self._outputs, dtype=self.out_dtype)
        team, args = self.threads(count), self._arguments
        scratch = torch.empty(team * scratch_rows(count) * self.scratch, dtype=torch.int32)
        args.x, args.out, args.rows, args.threads = rows.data_ptr(), out.data_ptr(), count, team
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
