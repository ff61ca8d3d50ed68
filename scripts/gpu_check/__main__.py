"""python -m scripts.gpu_check [--only kernels|exact|bench] [--out FOLDER] [--interpret]: see scripts/gpu_check.sh."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import infer.environment  # noqa: F401

# isort: split

from scripts.errors import reports_errors

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PARTS = ("kernels", "exact", "bench")
RESULTS = Path(__file__).resolve().parents[1] / "results"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./scripts/gpu_check.sh",
        description="Checks and times this machine's GPU: kernels, the engine's exactness, speculation end to end.",
        allow_abbrev=False,
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be given more than once")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the JSON report goes")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, in Triton's interpreter, with tiny shapes")
    parser.add_argument("--head", type=Path, metavar="FOLDER", help="an EAGLE-3 head of the demo target, for bench")
    parser.add_argument("--minutes", type=float, default=1.0, help="to train such a head, where none is given")
    parser.add_argument("--commit", help="what is checked, for the report of a machine without a git checkout")
    args = parser.parse_args(argv)
    args.only = args.only or list(PARTS)
    return args


@reports_errors
def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.interpret:  # read when triton is imported
        os.environ.update(TRITON_INTERPRET="1", HEADWAY_KERNELS="triton")
    from scripts.gpu_check import runner

    return runner.run(args)


sys.exit(main(sys.argv[1:]))
