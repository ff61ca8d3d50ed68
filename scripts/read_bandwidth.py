"""Measures how fast a CPU reads memory, and how much of that a linear layer of one row reaches in each weight format.

    python scripts/read_bandwidth.py
    python scripts/read_bandwidth.py --save read-bandwidth --rounds 9

Decoding one request reads every weight once per token, so bytes per second bound its speed. The machine's figure is
the fastest of three plain reads in torch (sum, largest element, dot product) of a buffer far larger than the caches; a
kernel's is the bytes that hold its weights, divided by the time of a call. The matrices of a format take turns, so that
none is in a cache. Figures are the best of `--rounds` rounds, each of which measures everything once, with one thread
and with all. Needs an idle machine. The last line of standard output is one JSON document.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE)] + [p for p in sys.path if os.path.abspath(p or ".") != HERE]
import infer.options.environment  # noqa: F401

# isort: split

import argparse
import datetime
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from infer.config import QUANTISED
from kernels.blocks import BLOCK, BLOCK_BYTES, FORMATS, BlockMatrix, BlockRows, reads_blocks
from kernels.linear import PackedLinear
from scripts.document import by_format, describe_machine, publish
from scripts.errors import reports_errors

if TYPE_CHECKING:
    from kernels.quantise import WeightFormat

MIB = 2**20
DTYPE, CPU = torch.bfloat16, torch.device("cpu")
WIDE = "bf16"
FINITE = 0xBF  # mask of a random byte: without this bit, the exponent of an fp16 scale is not that of infinity

Speeds = dict[str, float]  # GB/s by number of threads


def layer_of(name: str, outputs: int, inputs: int) -> PackedLinear:
    """Return a layer whose weights are random, in the format `name`: bf16, one of QUANTISED or one of FORMATS."""
    if name not in FORMATS:
        weight = torch.randn(outputs, inputs).to(DTYPE)
        return PackedLinear(weight, weight_format=cast("WeightFormat", "same" if name == WIDE else name))
    size = inputs // BLOCK[name] * BLOCK_BYTES[name]
    data = torch.randint(0, 256, (outputs, size), dtype=torch.uint8).bitwise_and_(FINITE)
    return PackedLinear(BlockMatrix([BlockRows(name, data)], DTYPE))


def layers_of(name: str, outputs: int, inputs: int, cold: int) -> list[PackedLinear]:
    """Return as many layers as hold `cold` bytes."""
    first = layer_of(name, outputs, inputs)
    return [first, *(layer_of(name, outputs, inputs) for _ in range(-(-cold // first.bytes) - 1))]


def gb_per_s(size: int, run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return size / (time.perf_counter() - begin) / 1e9


def read_once(buffer: Tensor) -> float:
    """Return the GB/s of the fastest plain read."""
    halves = buffer.chunk(2)
    reads = (buffer.sum, buffer.amax, lambda: torch.dot(*halves))
    return max(gb_per_s(buffer.nbytes, read) for read in reads)


def measure(
    layers: dict[str, list[PackedLinear]], buffer: Tensor, threads: Sequence[int], rounds: int
) -> tuple[Speeds, dict[str, Speeds]]:
    """Return the machine's GB/s and each format's: the best of the rounds."""
    machine, formats = dict[str, float](), {name: dict[str, float]() for name in layers}
    row = torch.randn(1, next(iter(layers.values()))[0].in_features).to(DTYPE)

    def keep(best: Speeds, count: int, value: float) -> None:
        best[str(count)] = max(value, best.get(str(count), 0.0))

    for _ in range(rounds):
        for count in threads:
            torch.set_num_threads(count)
            keep(machine, count, read_once(buffer))
            for name, group in layers.items():
                size = sum(layer.bytes for layer in group)
                keep(formats[name], count, gb_per_s(size, lambda group=group: [layer(row) for layer in group]))
    return machine, formats


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    available = [name for name in FORMATS if reads_blocks(name, DTYPE, CPU)]
    names = args.formats.split(",") if args.formats else [WIDE, *QUANTISED, *available]
    if unknown := [name for name in names if name not in (WIDE, *QUANTISED, *available)]:
        raise ValueError(f"--formats {unknown[0]}: not here; there are {', '.join((WIDE, *QUANTISED, *available))}")
    cores = torch.get_num_threads()
    machine_state = describe_machine()
    layers = {name: layers_of(name, args.outputs, args.inputs, args.cold * MIB) for name in names}
    buffer = torch.ones(args.cold * MIB)  # in fp32: four times as many bytes
    machine, formats = measure(layers, buffer, sorted({1, cores}), args.rounds)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine_state,
        "read_gb_s": machine,
        "shape": [args.outputs, args.inputs],
        "formats": {
            name: {"bits": 8 * layers[name][0].bytes / (args.outputs * args.inputs), "gb_s": speeds}
            for name, speeds in formats.items()
        },
    }


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python scripts/read_bandwidth.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument("--save", metavar="NAME", help="also write scripts/results/NAME-linear_<hardware>_<date>.json")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--outputs", type=int, default=16384, help="of a matrix")
    options.add_argument("--inputs", type=int, default=4096, help="of a matrix, a multiple of 256")
    options.add_argument("--cold", type=int, default=192, metavar="MIB", help="all matrices of a format together")
    options.add_argument("--formats", default="", metavar="NAMES", help="with commas between; all by default")
    return options


@reports_errors
def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    report = report_of(args)
    print(by_format(report), end="")
    publish(report, args.save, "linear")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
