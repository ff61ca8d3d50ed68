"""Tries one layer of each kind on this CPU: what computes it, whether rightly and with bits of its own, and how fast.

For scripts/doctor.py. A trial never raises: what fails is its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention import LayerShape, plan_attention
from kernels.attention import runs_in_c as takes_head
from kernels.capabilities import multiply, onednn_multiplies, prepack
from kernels.decoder import LayerParts, fuse_layers
from kernels.draft import DraftParts, fuse_draft
from kernels.linear import PackedLinear
from kernels.rows import AttentionRows
from kernels.slower import TILES, cure, name_of
from kernels.weights.ggml import BLOCK, FORMATS, GGML_BLOCK_BYTES, GgmlMatrix, GgmlRows, dequantize_ggml, reads_ggml
from kernels.weights.groups import GroupedMatrix, GroupedRows, why_unread
from kernels.weights.quantize import NARROW_FORMATS, TargetFormat, quantize, widen

CPU = torch.device("cpu")
OUTPUTS, INPUTS, ROWS = 1024, 1024, 5  # of a layer that is tried
HIDDEN, HEADS, HEAD_DIM, KEYS, VOCABULARY = 256, 4, 64, 512, 512  # of attention, decoders and heads
REPEATS = 3
SLOW = 3.0  # a kernel takes so many times as long as oneDNN for the same layer in fp32: more than other work explains
REPORT = "report this processor: the C kernels should read it"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
FINITE = 0xBF  # mask of a random byte: without this bit, the exponent of an fp16 scale is not that of infinity
IN_C = "a kernel in C"


class Trial(NamedTuple):
    name: str
    kernel: str  # what computed it, for people; "" if nothing did
    rate: float = 0.0
    unit: str = "GB/s"  # of weights with one row, or rows/s
    slower: str = ""  # what would be faster than this; "" if it is as fast as it gets here
    fault: str = ""

    @property
    def detail(self) -> str:
        return self.fault or (f"{self.kernel}, {self.rate:,.4g} {self.unit}" if self.rate else self.kernel)


def try_all() -> Iterator[Trial]:
    """Try everything that serving on a CPU runs."""
    for dtype in DTYPES:
        yield guarded(f"dense {name_of(dtype)}", lambda name, dtype=dtype: try_narrow(name, "same", dtype))
        yield guarded(f"attention {name_of(dtype)}", lambda name, dtype=dtype: try_attention(name, dtype))
    for weight_format in NARROW_FORMATS:
        yield guarded(weight_format, partial(try_narrow, weight_format=weight_format, dtype=torch.bfloat16))
    for ggml_format in FORMATS:
        yield guarded(ggml_format, lambda name: try_blocks(name, torch.bfloat16))
    yield guarded("int4 in groups", lambda name: try_groups(name, torch.bfloat16))
    yield guarded("layers in one call", lambda name: try_decoder(name, torch.bfloat16))
    yield guarded("a head's level in one call", lambda name: try_draft(name, torch.bfloat16))


def guarded(name: str, trial: Callable[[str], Trial]) -> Trial:
    try:
        return trial(name)
    except Exception as error:  # whatever a broken build raises is what was asked
        return Trial(name, "", fault=f"{type(error).__name__}: {error}")


def try_narrow(name: str, weight_format: TargetFormat, dtype: torch.dtype) -> Trial:
    """Try a layer whose weights are dense (`same`) or quantized by us."""
    weight = random((OUTPUTS, INPUTS)).to(dtype) * INPUTS**-0.5
    stored = widen(*quantize(weight, weight_format)) if weight_format in NARROW_FORMATS else weight.float()
    return try_layer(name, PackedLinear(weight, weight_format=weight_format), stored, dtype)


def try_blocks(name: str, dtype: torch.dtype) -> Trial:
    """Try a layer as a GGUF file stores it, dequantized where no kernel reads it."""
    size = INPUTS // BLOCK[name] * GGML_BLOCK_BYTES[name]
    data = torch.randint(0, 256, (OUTPUTS, size), generator=torch.Generator().manual_seed(0)).to(torch.uint8) & FINITE
    rows = GgmlRows(name, data)
    weight = dequantize_ggml(rows)
    read = reads_ggml(name, dtype, CPU)
    layer = PackedLinear(GgmlMatrix([rows], dtype) if read else weight.to(dtype))
    return try_layer(name, layer, weight, dtype, dequantized=not read)


def try_groups(name: str, dtype: torch.dtype) -> Trial:
    """Try a layer as GPTQ and AWQ store it, dequantized where no kernel reads it."""
    generator, group = torch.Generator().manual_seed(0), 128
    values = torch.randint(-8, 8, (OUTPUTS, INPUTS), generator=generator).to(torch.int8)
    zeros = torch.randint(-8, 8, (OUTPUTS, INPUTS // group), generator=generator).to(torch.int8)
    scales = torch.full((OUTPUTS, INPUTS // group), 0.01, dtype=torch.float16)
    rows = GroupedRows("int4", INPUTS, scales, None, lambda: (values, zeros), name)
    weight, read = rows.widened(), why_unread(rows, dtype, CPU) is None
    layer = PackedLinear(GroupedMatrix([rows], dtype) if read else weight.to(dtype))
    return try_layer(name, layer, weight, dtype, dequantized=not read)


def try_layer(
    name: str, layer: PackedLinear, weight: Tensor, dtype: torch.dtype, *, dequantized: bool = False
) -> Trial:
    """Compare a layer with float64 over the `weight` that it stores, and a row alone with the same among others."""
    x = random((ROWS, INPUTS)).to(dtype)
    out, expected = layer(x), x.double() @ weight.double().T
    if not (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max():
        return Trial(name, layer.kernel, fault=f"{layer.kernel} computes something else than float64 does")
    if not torch.equal(layer(x[:1]), out[:1]):
        return Trial(name, layer.kernel, fault=f"{layer.kernel} gives a row other bits alone than among {ROWS}")
    taken, kernel = seconds(lambda: layer(x[:1])), layer.kernel
    if layer.native is None:
        kernel = ("dequantized, " if dequantized or layer.narrow else "") + kernel
        return Trial(name, kernel, layer.bytes / taken / 1e9, slower=cure(dtype, REPORT))
    times = taken / widened_seconds()
    advice = (
        f"report this processor: the kernel takes {times:.0f} times as long as fp32 in oneDNN" if times > SLOW else ""
    )
    return Trial(name, kernel, layer.bytes / taken / 1e9, slower=advice)


@cache
def widened_seconds() -> float:
    """Return the time of a row through a layer in fp32 by oneDNN, infinite where it has none."""
    if not onednn_multiplies(torch.float32):
        return float("inf")
    packed, x = prepack(random((OUTPUTS, INPUTS))), random((2, INPUTS))
    return seconds(lambda: multiply(x, packed, None))


def try_attention(name: str, dtype: torch.dtype) -> Trial:
    table, scale, page = torch.arange(1, KEYS // 16 + 1)[None], HEAD_DIM**-0.5, 16
    cache = random((2, HEADS // 2, KEYS + page, HEAD_DIM)).to(dtype)
    q, k, v = (random((ROWS, heads, HEAD_DIM)).to(dtype) for heads in (HEADS, HEADS // 2, HEADS // 2))

    def attend(count: int) -> Tensor:
        rows = AttentionRows.blocks(table, [KEYS - ROWS], [count], page_size=page)
        plan = plan_attention(rows, HEADS, LayerShape(HEADS // 2, HEAD_DIM), dtype)
        return plan(q[:count], k[:count], v[:count], cache, scale)

    out, kernel = attend(ROWS), IN_C if takes_head(HEAD_DIM, dtype, CPU) else TILES
    keys, values = (each[:, page:].double().repeat_interleave(2, 0) for each in cache)
    hidden = torch.arange(KEYS) >= torch.arange(KEYS - ROWS + 1, KEYS + 1)[:, None]
    scores = torch.einsum("rhd,hkd->hrk", q.double(), keys).mul(scale).masked_fill(hidden, float("-inf"))
    expected = (scores.softmax(-1) @ values).transpose(0, 1).reshape(ROWS, -1)
    if not (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max():
        return Trial(name, kernel, fault=f"{kernel} computes something else than float64 does")
    if not torch.equal(attend(1), out[:1]):
        return Trial(name, kernel, fault=f"{kernel} gives a row other bits alone than among {ROWS}")
    advice = "" if kernel == IN_C else cure(dtype, REPORT)
    return Trial(name, kernel, ROWS / seconds(lambda: attend(ROWS)), f"rows/s over {KEYS} keys", advice)


def try_decoder(name: str, dtype: torch.dtype) -> Trial:
    """Whether a target's layers run in one call."""
    fused = fuse_layers([layer_parts(dtype)], None, 1e-5, HEAD_DIM) is not None
    return Trial(name, IN_C) if fused else Trial(name, "a call per operation", slower=cure(dtype, REPORT))


def try_draft(name: str, dtype: torch.dtype) -> Trial:
    """Whether a recurrent head drafts a level in one call."""
    decoder = fuse_layers([layer_parts(dtype)], None, 1e-5, HEAD_DIM)
    if decoder is not None:
        rotary, joined = torch.zeros(2, KEYS, HEAD_DIM), PackedLinear(random((HIDDEN, 2 * HIDDEN)).to(dtype))
        lm_head, embedding = (random((VOCABULARY, HIDDEN)).to(dtype) for _ in range(2))
        head = DraftParts(
            decoder, HEADS, HEADS // 2, embedding, (rotary[0].to(dtype), rotary[1].to(dtype)), joined, None,
            PackedLinear(lm_head), torch.arange(VOCABULARY),
        )  # fmt: skip
        if fuse_draft(head) is not None:
            return Trial(name, IN_C)
    return Trial(name, "a call per operation", slower=cure(dtype, REPORT))


def layer_parts(dtype: torch.dtype) -> LayerParts:
    def linear(outputs: int, inputs: int) -> PackedLinear:
        return PackedLinear(random((outputs, inputs)).to(dtype))

    norm, inner = torch.ones(HIDDEN, dtype=dtype), 2 * HIDDEN
    return LayerParts(
        norm, linear((2 * HEADS // 2 + HEADS) * HEAD_DIM, HIDDEN), None, linear(HIDDEN, HEADS * HEAD_DIM), norm,
        linear(2 * inner, HIDDEN), linear(HIDDEN, inner),
    )  # fmt: skip


def random(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def seconds(run: Callable[[], object]) -> float:
    """Return the least time of a few runs, which other work on the machine may lengthen."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)
