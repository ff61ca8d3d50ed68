"""Measures how fast a CPU reads memory, and how much of that a linear layer of one row reaches in each weight format.

    python scripts/bench.py bandwidth
    python scripts/bench.py bandwidth save=read-bandwidth rounds=9 formats=[bf16,int8,Q4_K]

Decoding one request reads every weight once per token, so bytes per second bound its speed. The machine's figure is
the fastest of three plain reads in torch (sum, largest element, dot product) of a buffer far larger than the caches; a
kernel's is the bytes that hold its weights, divided by the time of a call. The matrices of a format take turns, so that
none is in a cache. Figures are the best of `rounds` rounds, each of which measures everything once, with one thread
and with all. Needs an idle machine.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from infer.config import QUANTIZED
from infer.options.cli import entry_point
from kernels.ggml import BLOCK, FORMATS, GGML_BLOCK_BYTES, GgmlMatrix, GgmlRows, reads_ggml
from kernels.linear import PackedLinear
from scripts.benchmarks.config import BandwidthConfig
from scripts.benchmarks.document import describe_machine, publish
from scripts.benchmarks.tables import by_format

if TYPE_CHECKING:
    from kernels.quantize import WeightFormat

MIB = 2**20
DTYPE, CPU = torch.bfloat16, torch.device("cpu")
WIDE, READ = "bf16", "plain read"
FINITE = 0xBF  # mask of a random byte: without this bit, the exponent of an fp16 scale is not that of infinity

Speeds = dict[str, float]  # GB/s by number of threads


def layer_of(name: str, outputs: int, inputs: int) -> PackedLinear:
    """Return a layer whose weights are random, in the format `name`: bf16, one of QUANTIZED or one of FORMATS."""
    if name not in FORMATS:
        weight = torch.randn(outputs, inputs).to(DTYPE)
        return PackedLinear(weight, weight_format=cast("WeightFormat", "same" if name == WIDE else name))
    size = inputs // BLOCK[name] * GGML_BLOCK_BYTES[name]
    data = torch.randint(0, 256, (outputs, size), dtype=torch.uint8).bitwise_and_(FINITE)
    return PackedLinear(GgmlMatrix([GgmlRows(name, data)], DTYPE))


def gb_per_s(size: int, run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return size / (time.perf_counter() - begin) / 1e9


def measure(layers: dict[str, list[PackedLinear]], cold: int, rounds: int) -> dict[str, Speeds]:
    """Return the best GB/s of the rounds with one thread and with all: of each format, and under READ of memory."""
    buffer = torch.ones(cold)  # in fp32: four times as many bytes
    plain = (buffer.sum, buffer.amax, lambda: torch.dot(*buffer.chunk(2)))
    row = torch.randn(1, next(iter(layers.values()))[0].in_features).to(DTYPE)
    best: dict[str, Speeds] = {READ: {}, **{name: {} for name in layers}}
    for _, threads in itertools.product(range(rounds), sorted({1, torch.get_num_threads()})):
        torch.set_num_threads(threads)
        speeds = {READ: max(gb_per_s(buffer.nbytes, read) for read in plain)}
        for name, group in layers.items():
            size = sum(layer.bytes for layer in group)
            speeds[name] = gb_per_s(size, lambda group=group: [layer(row) for layer in group])
        for name, speed in speeds.items():
            best[name][str(threads)] = max(speed, best[name].get(str(threads), 0.0))
    return best


@entry_point("bandwidth", BandwidthConfig)
def main(config: BandwidthConfig) -> None:
    available = [WIDE, *QUANTIZED, *(name for name in FORMATS if reads_ggml(name, DTYPE, CPU))]
    if unknown := [name for name in config.formats or () if name not in available]:
        raise ValueError(f"formats={unknown[0]}: not here; there are {', '.join(available)}")
    torch.manual_seed(0)
    machine, cold = describe_machine(), config.cold_mb * MIB
    layers: dict[str, list[PackedLinear]] = {name: [] for name in config.formats or available}
    for name, group in layers.items():
        while sum(layer.bytes for layer in group) < cold:
            group.append(layer_of(name, config.outputs, config.inputs))
    speeds = measure(layers, cold, config.rounds)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "read_gb_s": speeds[READ],
        "shape": [config.outputs, config.inputs],
        "formats": {
            name: {"bits": 8 * group[0].bytes / (config.outputs * config.inputs), "gb_s": speeds[name]}
            for name, group in layers.items()
        },
    }
    print(by_format(report), end="")
    publish(report, config.save, "linear")
