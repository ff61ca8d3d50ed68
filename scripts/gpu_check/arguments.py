"""The command line of gpu_check. Imports no torch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from scripts.gpu_check import EXTRA, PARTS

OUT = os.environ.get("OUT") or Path(__file__).resolve().parents[1] / "results"
SECONDS = 540  # of all parts together: a call of ten minutes, less one to start and to end


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./scripts/gpu_check.sh",
        description="Checks and times this machine's GPU: kernels, the engine's exactness, training, speculation.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", action="append", choices=(*PARTS, *EXTRA), help="one part; may be given more than once"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help="where the JSON report grows; default: $OUT if set"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of all parts together; default: {SECONDS}")
    parser.add_argument("--dry-run", action="store_true", help="list what would run, and how long it takes at most")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, in Triton's interpreter, with tiny shapes")
    parser.add_argument(
        "--head", type=Path, metavar="FOLDER", help="an EAGLE-3 head of the demo target; else one is trained"
    )
    parser.add_argument("--minutes", type=float, default=0.5, help="of training, where no head is given; default: 0.5")
    parser.add_argument(
        "--bundled-ptxas", action="store_true", help="check kernels as Triton's own ptxas makes them, and by no other"
    )
    parser.add_argument("--commit", help="what is checked, where the tree is a copy without its history")
    # What the command starts itself with: a share of the kernels to compile, or a group of checks to add to a report.
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    for option, kind in (("--share", str), ("--group", str), ("--report", Path), ("--until", float)):
        parser.add_argument(option, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.only = [part for part in (*PARTS, *EXTRA) if part in (args.only or PARTS)]
    return args
